// Iterates over a dataset for bench_loader. Reads "CONTESTANT CASE WORKERS SAMPLES" from standard input, runs
// passes until that many samples have been loaded, and prints the seconds taken.
#include <chrono>
#include <iostream>
#include <map>
#include <string>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include "cmake/multicall.h"

namespace lockstep::bench::loader {
namespace {

constexpr std::int64_t kBatch = 32;

struct Data {
  torch::Tensor x, y;
};

// The cases of loader.py.in, with the same shapes.
Data make(const std::string& name) {
  if (name == "seed") return {torch::randn({65536, 10}), torch::randn({65536, 1})};
  if (name == "images") return {torch::randn({8192, 3, 32, 32}), torch::randint(10, {8192}, torch::kLong)};
  throw lockstep::ConfigError("unknown case '" + name + "'");
}

// A typical torch::data dataset of two tensors; its own TensorDataset has one tensor.
class Pairs : public torch::data::datasets::Dataset<Pairs> {
 public:
  explicit Pairs(const Data& data) : data_(data) {}
  torch::data::Example<> get(std::size_t index) override {
    const auto i = static_cast<std::int64_t>(index);
    return {data_.x[i], data_.y[i]};
  }
  std::optional<std::size_t> size() const override { return static_cast<std::size_t>(data_.x.size(0)); }

 private:
  Data data_;
};

template <typename Loader>
void go_through(Loader& loader, std::int64_t samples) {
  while (samples > 0)
    for (auto& batch : loader) {
      if constexpr (requires { batch.data; })
        samples -= batch.data.size(0);
      else
        samples -= std::get<0>(batch).size(0);
      if (samples <= 0) break;
    }
}

void run(const std::string& contestant, const Data& data, int workers, std::int64_t samples) {
  if (contestant == "lockstep") {
    lockstep::DataLoader loader(lockstep::TensorDataset{data.x, data.y},
                                {.batch_size = kBatch, .shuffle = true, .num_workers = workers});
    go_through(loader, samples);
  } else if (contestant == "torch_data") {
    auto loader = torch::data::make_data_loader<torch::data::samplers::RandomSampler>(
        Pairs(data).map(torch::data::transforms::Stack<>()),
        torch::data::DataLoaderOptions().batch_size(kBatch).workers(static_cast<std::size_t>(workers)));
    // torch::data cannot restart a loader in the middle of a pass, so only whole passes are possible.
    while (samples > 0)
      for (auto& batch : *loader) samples -= batch.data.size(0);
  } else if (contestant == "index_select") {  // The upper bound: the same rows without a loader.
    const auto order = torch::randperm(data.x.size(0), torch::kLong).split(kBatch);
    while (samples > 0)
      for (const auto& indices : order) {
        const auto x = data.x.index_select(0, indices), y = data.y.index_select(0, indices);
        samples -= x.size(0);
        if (samples <= 0) break;
      }
  } else {
    throw lockstep::ConfigError("unknown contestant '" + contestant + "'");
  }
}

}  // namespace

MULTICALL_MAIN(loader_rounds) {
  torch::set_num_threads(1);
  std::map<std::string, Data> cases;
  std::string contestant, name;
  int workers = 0;
  std::int64_t samples = 0;
  while (std::cin >> contestant >> name >> workers >> samples) {
    if (!cases.contains(name)) cases[name] = make(name);
    const auto begin = std::chrono::steady_clock::now();
    run(contestant, cases[name], workers, samples);
    std::cout << std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() << std::endl;
  }
  return 0;
}

}  // namespace lockstep::bench::loader

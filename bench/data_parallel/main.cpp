// Compares a training step of DataParallel with the same step on one device and with LibTorch's own
// data_parallel, which clones the module at every step. On the CPU each replica has one thread, and so does
// the single device. A CPU-only LibTorch has no data_parallel to link, so its parts, replicate and
// parallel_apply, run between chunk and cat, with as many threads in total.
//
// A step: clear gradients, forward, loss, backward, SGD. Contestants take turns; each step uses fresh data,
// and denormals are flushed.
#include <malloc.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/lockstep.h>
#include <torch/torch.h>
#ifdef LOCKSTEP_BENCH_TORCH_DATA_PARALLEL
#include <torch/nn/parallel/data_parallel.h>
#endif
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace {

namespace nn = torch::nn;
using at::Tensor;

struct EncoderImpl : nn::Cloneable<EncoderImpl> {
  EncoderImpl() { reset(); }
  void reset() override {
    layers = register_module(
        "layers", nn::TransformerEncoder(nn::TransformerEncoderOptions(
                      nn::TransformerEncoderLayerOptions(128, 4).dim_feedforward(512).dropout(0), 2)));
  }
  // Batch first; TransformerEncoder expects it second.
  Tensor forward(const Tensor& x) { return layers(x.transpose(0, 1)).transpose(0, 1); }
  nn::TransformerEncoder layers{nullptr};
};
TORCH_MODULE(Encoder);

// Every case is a Sequential that maps one tensor to one tensor.
struct Case {
  std::string name;
  std::vector<std::int64_t> input;  // With the batch first.
  nn::Sequential model;
};

std::vector<Case> all_cases() {
  const auto conv = [](int in, int out) { return nn::Conv2d(nn::Conv2dOptions(in, out, 3).padding(1)); };
  return {
      {"mlp",
       {128, 1024},
       nn::Sequential(nn::Linear(1024, 2048), nn::ReLU(), nn::Linear(2048, 2048), nn::ReLU(),
                      nn::Linear(2048, 2048), nn::ReLU(), nn::Linear(2048, 10))},
      {"conv",
       {32, 3, 32, 32},
       nn::Sequential(conv(3, 32), nn::BatchNorm2d(32), nn::ReLU(), conv(32, 64), nn::BatchNorm2d(64),
                      nn::ReLU(), nn::MaxPool2d(2), conv(64, 64), nn::ReLU(), nn::AdaptiveAvgPool2d(1),
                      nn::Flatten(), nn::Linear(64, 10))},
      {"encoder", {16, 64, 128}, nn::Sequential(Encoder(), nn::Linear(128, 10))},
      {"seed", {32, 10}, nn::Sequential(nn::Linear(10, 1))},
  };
}

using Forward = std::function<Tensor(const Tensor&)>;

// LibTorch's data_parallel: clones the module, runs the clones with parallel_for and joins the results.
// Backward is one graph on the calling thread.
class TorchDataParallel {
 public:
  TorchDataParallel(nn::Sequential model, std::vector<at::Device> devices)
      : model_(std::move(model)), devices_(std::move(devices)) {}

  Tensor forward(const Tensor& x) {
#ifdef LOCKSTEP_BENCH_TORCH_DATA_PARALLEL
    if (devices_[0].is_cuda()) return nn::parallel::data_parallel(model_, x, devices_);
#endif
    const auto pieces = x.chunk(static_cast<std::int64_t>(devices_.size()));
    clones_.clear();
    for (std::size_t i = 0; i < pieces.size(); ++i)
      clones_.push_back(std::dynamic_pointer_cast<nn::SequentialImpl>(model_->clone(devices_[i])));
    std::vector<Tensor> results(pieces.size());
    const bool grad = torch::GradMode::is_enabled();
    at::parallel_for(0, static_cast<std::int64_t>(pieces.size()), 1,
                     [&](std::int64_t begin, std::int64_t end) {
                       torch::AutoGradMode mode(grad);
                       for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i)
                         results[i] = clones_[i]->forward(pieces[i]);
                     });
    return at::cat(results);
  }

  // Does the work of its ReduceAdd nodes in backward.
  void sum_gradients() {
    torch::NoGradGuard no_grad;
    auto parameters = model_->parameters();
    for (const auto& clone : clones_) {
      const auto theirs = clone->parameters();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        auto& sum = parameters[i].mutable_grad();
        if (sum.defined())
          sum.add_(theirs[i].grad());
        else
          sum = theirs[i].grad();
      }
    }
    clones_.clear();
  }

 private:
  nn::Sequential model_;
  std::vector<at::Device> devices_;
  std::vector<std::shared_ptr<nn::SequentialImpl>> clones_;
};

struct Contestant {
  std::string name;
  int threads;  // Number of threads of the calling thread.
  Forward forward;
  std::vector<double> milliseconds = {}, cpu_milliseconds = {};
};

double cpu_seconds() {
  timespec time;
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class Bench {
 public:
  Bench(Case the_case, std::vector<at::Device> devices)
      : case_(std::move(the_case)), devices_(std::move(devices)) {
    case_.model->to(devices_[0]);
    optimizer_.emplace(case_.model->parameters(), 1e-3);
    parallel_.emplace(case_.model, devices_, lockstep::DataParallelOptions{.threads_per_replica = 1});
    torch_.emplace(case_.model, devices_);
    contestants_.push_back({"one", 1, [&](const Tensor& x) { return case_.model->forward(x); }});
    contestants_.push_back({"lockstep", 1, [&](const Tensor& x) { return (*parallel_)(x); }});
    contestants_.push_back(
        {"torch", static_cast<int>(devices_.size()), [&](const Tensor& x) { return torch_->forward(x); }});
  }

  nlohmann::ordered_json measure(double seconds) {
    using Clock = std::chrono::steady_clock;
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    for (int block = 0; block < 3 || Clock::now() < end; ++block)
      for (auto& each : contestants_) {
        at::set_num_threads(each.threads);
        step(each);  // Warms up caches and threads after another contestant.
        const auto begin = Clock::now();
        const double cpu_begin = cpu_seconds();
        int steps = 0;
        for (; steps < 3 || Clock::now() - begin < std::chrono::milliseconds(50); ++steps) step(each);
        const std::chrono::duration<double, std::milli> time = Clock::now() - begin;
        if (block == 0) continue;
        each.milliseconds.push_back(time.count() / steps);
        each.cpu_milliseconds.push_back(1e3 * (cpu_seconds() - cpu_begin) / steps);
      }
    std::map<std::string, double> found;
    for (const auto& each : contestants_) found[each.name] = median(each.milliseconds);
    std::vector<double> speedups;
    for (std::size_t i = 0; i < contestants_[0].milliseconds.size(); ++i)
      speedups.push_back(contestants_[0].milliseconds[i] / contestants_[1].milliseconds[i]);
    std::sort(speedups.begin(), speedups.end());
    std::vector<std::string> names;
    for (const auto device : devices_) names.push_back(device.str());
    return {{"case", case_.name},
            {"devices", names},
            {"batch", case_.input[0]},
            {"one_ms", found["one"]},
            {"lockstep_ms", found["lockstep"]},
            {"torch_ms", found["torch"]},
            {"speedup", median(speedups)},
            {"speedup_p10", speedups[speedups.size() / 10]},
            {"speedup_p90", speedups[speedups.size() * 9 / 10]},
            {"over_torch", found["torch"] / found["lockstep"]},
            {"one_cpu_ms", median(contestants_[0].cpu_milliseconds)},
            {"lockstep_cpu_ms", median(contestants_[1].cpu_milliseconds)},
            {"torch", TORCH_VERSION},
            {"cores", std::thread::hardware_concurrency()}};
  }

 private:
  void step(Contestant& each) {
    const auto x = torch::randn(case_.input).to(devices_[0]);
    optimizer_->zero_grad();
    const auto loss = each.forward(x).square().mean();
    loss.backward();
    torch_->sum_gradients();
    optimizer_->step();
    if (devices_[0].is_cuda()) torch::cuda::synchronize();
  }

  Case case_;
  std::vector<at::Device> devices_;
  std::optional<torch::optim::SGD> optimizer_;
  std::optional<lockstep::DataParallel<nn::SequentialImpl>> parallel_;
  std::optional<TorchDataParallel> torch_;
  std::vector<Contestant> contestants_;
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Compare DataParallel with one device and with LibTorch's data_parallel");
  std::vector<std::string> cases, devices = {"cpu", "cpu"};
  double seconds = 5;
  std::string json;
  app.add_option("--case", cases, "mlp, conv, encoder or seed (default: all)")->delimiter(',');
  app.add_option("--devices", devices, "Devices (default: cpu,cpu)")->delimiter(',');
  app.add_option("--seconds", seconds, "Time per case");
  app.add_option("--json", json, "Write the rows to FILE")->option_text("FILE");
  CLI11_PARSE(app, argc, argv);

  // Keep freed memory in the process for every contestant; otherwise this would measure the kernel.
  ::mallopt(M_MMAP_THRESHOLD, 1 << 30);
  ::mallopt(M_TRIM_THRESHOLD, 1 << 30);
  ::mallopt(M_TOP_PAD, 64 << 20);
  at::globalContext().setFlushDenormal(true);
  torch::manual_seed(1);
  auto rows = nlohmann::ordered_json::array();
  fmt::print("{:8} {:>10} {:>12} {:>10} {:>9} {:>16} {:>11} {:>9}\n", "case", "one, ms", "lockstep, ms",
             "torch, ms", "speedup", "p10 to p90", "over torch", "CPU time");
  for (const auto& each : all_cases()) {
    if (!cases.empty() && std::find(cases.begin(), cases.end(), each.name) == cases.end()) continue;
    std::vector<at::Device> places;
    for (const auto& name : devices) places.emplace_back(name);
    const auto row = Bench(each, places).measure(seconds);
    const auto number = [&](const char* key) { return row[key].get<double>(); };
    fmt::print("{:8} {:10.3f} {:12.3f} {:10.3f} {:8.2f}x {:>16} {:10.2f}x {:8.2f}x\n", each.name,
               number("one_ms"), number("lockstep_ms"), number("torch_ms"), number("speedup"),
               fmt::format("{:.2f} to {:.2f}", number("speedup_p10"), number("speedup_p90")),
               number("over_torch"), number("lockstep_cpu_ms") / number("one_cpu_ms"));
    std::fflush(stdout);
    rows.push_back(row);
    if (!json.empty()) std::ofstream(json) << rows.dump(1) << '\n';
  }
  if (rows.empty()) {
    std::cerr << "unknown case; expected mlp, conv, encoder or seed\n";
    return 2;
  }
}

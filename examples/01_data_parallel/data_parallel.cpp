// A linear model on random data, trained on one device or on several. README.md shows the Python program that
// prints the same lines.
//
//   build/bin/01_data_parallel --seed 0                     all CUDA devices, or one CPU worker without CUDA
//   build/bin/01_data_parallel --seed 0 --devices cpu,cpu   two CPU workers
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

namespace ls = lockstep;

struct SimpleModelImpl : torch::nn::Cloneable<SimpleModelImpl> {
  SimpleModelImpl() { reset(); }
  void reset() override { linear = register_module("linear", torch::nn::Linear(10, 1)); }
  torch::Tensor forward(const torch::Tensor& x) { return linear(x); }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(SimpleModel);

struct Arguments {
  std::uint64_t seed = 0;
  std::vector<at::Device> devices;
};

Arguments parse(int argc, char** argv) {
  Arguments result;
  try {
    for (int i = 1; i < argc; i += 2) {
      const std::string flag = argv[i];
      if (i + 1 == argc) throw std::invalid_argument(flag + " needs a value");
      std::stringstream value(argv[i + 1]);
      if (flag == "--seed") {
        if (!(value >> result.seed) || !value.eof()) throw std::invalid_argument("--seed: expected a number");
      } else if (flag == "--devices") {
        for (std::string name; std::getline(value, name, ',');) result.devices.emplace_back(name);
      } else {
        throw std::invalid_argument("unknown option " + flag);
      }
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\nusage: 01_data_parallel [--seed N] [--devices cpu,cpu]\n", e.what());
    std::exit(2);
  }
  return result;
}

int main(int argc, char** argv) {
  auto [seed, devices] = parse(argc, argv);
  torch::manual_seed(seed);

  auto X = torch::randn({1000, 10});
  auto y = torch::randn({1000, 1});
  ls::TensorDataset dataset(X, y);
  ls::DataLoader loader(dataset, {.batch_size = 32});

  if (devices.empty()) {
    for (int i = 0; i < static_cast<int>(torch::cuda::device_count()); ++i)
      devices.emplace_back(torch::kCUDA, i);
    if (devices.empty()) devices.emplace_back(torch::kCPU);
  }
  const auto device = devices[0];
  SimpleModel model;
  model->to(device);
  ls::DataParallel parallel(model, devices);  // With one device, it calls the model directly.

  ls::Adam optimizer(model->parameters(), {.lr = 1e-3});
  for (int epoch = 0; epoch < 10; ++epoch) {
    int i = 0;
    for (auto& [inputs, labels] : loader) {
      optimizer.zero_grad();
      auto outputs = parallel(inputs.to(device));
      auto loss = torch::mse_loss(outputs, labels.to(device));
      loss.backward();
      optimizer.step();
      std::printf("Epoch [%d/10], Step [%d/%d], Loss: %.4f\n", epoch + 1, ++i,
                  static_cast<int>(loader.size()), loss.item<double>());
    }
  }
}

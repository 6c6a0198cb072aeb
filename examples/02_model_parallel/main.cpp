// A model in two parts, each on its own device: the second example of the article. README.md shows the Python
// program that prints the same values.
//
//   build/bin/02_model_parallel --seed 0                      two CUDA devices, or one, or the CPU
//   build/bin/02_model_parallel --seed 0 --devices cuda:0,cpu
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

namespace ls = lockstep;

struct ModelPart1Impl : torch::nn::Module {
  ModelPart1Impl() { register_module("linear1", linear1); }
  torch::Tensor forward(const torch::Tensor& x) { return linear1(x); }
  torch::nn::Linear linear1{10, 5};
};
TORCH_MODULE(ModelPart1);

struct ModelPart2Impl : torch::nn::Module {
  ModelPart2Impl() { register_module("linear2", linear2); }
  torch::Tensor forward(const torch::Tensor& x) { return linear2(x); }
  torch::nn::Linear linear2{5, 1};
};
TORCH_MODULE(ModelPart2);

struct Arguments {
  std::uint64_t seed = 0;
  std::vector<at::Device> devices;
};

Arguments parse(int argc, char** argv) {
  Arguments result;
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i];
    if (i + 1 == argc) throw std::invalid_argument(flag + " needs a value");
    std::stringstream value(argv[i + 1]);
    if (flag == "--seed") {
      if (!(value >> result.seed) || !value.eof()) throw std::invalid_argument("--seed: expected a number");
    } else if (flag == "--devices") {
      for (std::string name; std::getline(value, name, ',');) result.devices.emplace_back(name);
      if (result.devices.size() != 2)
        throw std::invalid_argument("--devices: expected two devices, such as cuda:0,cpu");
    } else {
      throw std::invalid_argument("unknown option " + flag);
    }
  }
  if (result.devices.empty()) {
    const auto count = static_cast<int>(torch::cuda::device_count());
    for (int i = 0; i < 2; ++i)
      result.devices.push_back(count > 0 ? at::Device(at::kCUDA, static_cast<at::DeviceIndex>(i % count))
                                         : at::Device(at::kCPU));
  }
  return result;
}

constexpr const char* kUsage = "usage: 02_model_parallel [--seed N] [--devices A,B]";

int refuse(const char* why) {
  std::fprintf(stderr, "%s\n%s\n", why, kUsage);
  return 2;
}

int main(int argc, char** argv) try {
  if (argc > 1 && std::string(argv[1]) == "--help") return std::puts(kUsage), 0;
  const auto [seed, devices] = parse(argc, argv);
  torch::manual_seed(seed);

  ls::Placed model_part1(ModelPart1(), devices[0]);
  ls::Placed model_part2(ModelPart2(), devices[1]);

  auto inputs = torch::randn({100, 10});
  auto output = model_part2(model_part1(inputs)).cpu();  // Moves to the first device, then to the second.
  for (int i = 0; i < 100; ++i) std::printf("%.4f\n", output[i].item<double>());
} catch (const c10::Error& error) {
  return refuse(error.what_without_backtrace());
} catch (const std::exception& error) {
  return refuse(error.what());
}

// A linear model on random data, trained on one device or on several at once. README.md shows the Python
// program that prints the same lines.
//
//   build/bin/01_data_parallel --seed 0                        every CUDA device where there are several,
//   else one device build/bin/01_data_parallel --seed 0 --devices cpu,cpu      two workers on the CPU
#include <cmath>
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

// ---- Stand-ins for lockstep's TensorDataset, DataLoader and Adam: with those, this part goes
// ---------------------

struct Batches {
  std::vector<std::pair<torch::Tensor, torch::Tensor>> pairs;
  Batches(const torch::Tensor& x, const torch::Tensor& y, int batch_size) {
    const auto xs = x.split(batch_size), ys = y.split(batch_size);
    for (std::size_t i = 0; i < xs.size(); ++i) pairs.emplace_back(xs[i], ys[i]);
  }
  std::size_t size() const { return pairs.size(); }
  auto begin() const { return pairs.begin(); }
  auto end() const { return pairs.end(); }
};

// The operations of torch.optim.Adam in its order: the same bits.
class Adam {
 public:
  Adam(std::vector<torch::Tensor> parameters, double lr) : parameters_(std::move(parameters)), lr_(lr) {
    for (const auto& p : parameters_) {
      m_.push_back(torch::zeros_like(p));
      v_.push_back(torch::zeros_like(p));
    }
  }
  void zero_grad() {
    for (auto& p : parameters_) p.mutable_grad().reset();
  }
  void step() {
    torch::NoGradGuard no_grad;
    ++step_;
    const double correction1 = 1 - std::pow(0.9, step_), correction2 = 1 - std::pow(0.999, step_);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const auto& g = parameters_[i].grad();
      m_[i].lerp_(g, 1 - 0.9);
      v_[i].mul_(0.999).addcmul_(g, g, 1 - 0.999);
      parameters_[i].addcdiv_(m_[i], (v_[i].sqrt() / std::sqrt(correction2)).add_(1e-8),
                              -(lr_ / correction1));
    }
  }

 private:
  std::vector<torch::Tensor> parameters_, m_, v_;
  double lr_;
  int step_ = 0;
};

// ---- End of the stand-ins
// ------------------------------------------------------------------------------------

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
        if (!(value >> result.seed) || !value.eof()) throw std::invalid_argument("--seed takes a number");
      } else if (flag == "--devices") {
        for (std::string name; std::getline(value, name, ',');) result.devices.emplace_back(name);
      } else {
        throw std::invalid_argument("no option " + flag);
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
  Batches loader(X, y, 32);

  if (devices.empty()) {
    for (int i = 0; i < static_cast<int>(torch::cuda::device_count()); ++i)
      devices.emplace_back(torch::kCUDA, i);
    if (devices.empty()) devices.emplace_back(torch::kCPU);
  }
  const auto device = devices[0];
  SimpleModel model;
  model->to(device);
  ls::DataParallel parallel(model, devices);  // on one device it is the model itself

  Adam optimizer(model->parameters(), 1e-3);
  for (int epoch = 0; epoch < 10; ++epoch) {
    int i = 0;
    for (const auto& [inputs, labels] : loader) {
      optimizer.zero_grad();
      auto outputs = parallel(inputs.to(device));
      auto loss = torch::mse_loss(outputs, labels.to(device));
      loss.backward();
      optimizer.step();
      std::printf("Epoch [%d/10], Step [%d/%zu], Loss: %.4f\n", epoch + 1, ++i, loader.size(),
                  loss.item<double>());
    }
  }
}

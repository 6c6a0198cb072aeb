// Models and data that are the same on every rank and in every run, even if ranks are threads.
#pragma once

#include <torch/torch.h>

namespace lockstep::testing {

inline at::Tensor numbers(std::uint64_t seed, at::IntArrayRef sizes) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed));
}

// Sets the module's parameters from the seed, independently of the global generator.
inline void fill_parameters(torch::nn::Module& module, std::uint64_t seed) {
  torch::NoGradGuard no_grad;
  for (auto& parameter : module.parameters())
    parameter.copy_(numbers(seed++, parameter.sizes()).mul_(0.3).to(parameter.scalar_type()));
}

struct MlpImpl : torch::nn::Module {
  MlpImpl(int in = 6, int hidden = 9, int out = 3)
      : first(in, hidden), second(hidden, hidden), third(hidden, out) {
    register_module("first", first);
    register_module("second", second);
    register_module("third", third);
    fill_parameters(*this, 100);
  }
  at::Tensor forward(const at::Tensor& x) { return third(second(first(x).tanh()).tanh()); }
  torch::nn::Linear first, second, third;
};
TORCH_MODULE(Mlp);

inline constexpr std::int64_t kWide = 300;  // 300 x 300 floats are reduced in place, 300 are not.

struct WideImpl : torch::nn::Module {
  WideImpl() : first(20, kWide), second(kWide, kWide), third(kWide, kWide), last(kWide, 2) {
    register_module("first", first);
    register_module("second", second);
    register_module("third", third);
    register_module("last", last);
    fill_parameters(*this, 500);
    torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) parameter.mul_(0.2);
  }
  at::Tensor forward(const at::Tensor& x) { return last(third(second(first(x).tanh()).tanh()).tanh()); }
  torch::nn::Linear first, second, third, last;
};
TORCH_MODULE(Wide);

// Uses one of two branches, or none.
struct BranchesImpl : torch::nn::Module {
  BranchesImpl() : left(4, 4), right(4, 4), never(4, 4), last(4, 2) {
    register_module("left", left);
    register_module("right", right);
    register_module("never", never);
    register_module("last", last);
    fill_parameters(*this, 200);
  }
  at::Tensor forward(const at::Tensor& x, bool go_left) { return last(go_left ? left(x) : right(x)); }
  torch::nn::Linear left, right, never, last;
};
TORCH_MODULE(Branches);

inline std::vector<at::Tensor> gradients_of(torch::nn::Module& module) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : module.parameters())
    gradients.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
  return gradients;
}

inline std::vector<at::Tensor> values_of(torch::nn::Module& module) {
  std::vector<at::Tensor> values;
  for (const auto& parameter : module.parameters()) values.push_back(parameter.detach().clone());
  return values;
}

// True if the bits are equal and the same tensors are defined.
inline bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i].defined() != b[i].defined()) return false;
    if (a[i].defined() && !at::equal(a[i], b[i])) return false;
  }
  return true;
}

inline bool all_close(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b,
                      double tolerance = 1e-6) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i].defined() != b[i].defined()) return false;
    if (a[i].defined() && !at::allclose(a[i].to_dense(), b[i].to_dense(), tolerance, tolerance)) return false;
  }
  return true;
}

}  // namespace lockstep::testing

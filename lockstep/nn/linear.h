// torch::nn::Linear whose forward is a single call of at::linear.
//
//   lockstep::nn::Linear fc(768, 3072);                     // or Unit<nn::Linear>
//
// LibTorch's version calls torch::nn::functional::linear, which for inputs of three or more dimensions does a
// matmul and then adds the bias separately. This class derives from LibTorch's, with the same construction,
// initialisation and names, so it works wherever that does. On CUDA, one of Lockstep's kernels computes the
// gradient of the bias.
//
//   lockstep::nn::LinearGELU up(768, 3072);                 // gelu(linear(x)), with the tanh approximation
//
// On CUDA, backward of LinearGELU computes the gradients of GELU and of the bias in one pass over memory.
#pragma once

#include <memory>
#include <optional>

#include <torch/nn/modules/linear.h>

namespace lockstep::nn {

class LinearImpl : public torch::nn::LinearImpl {
 public:
  using torch::nn::LinearImpl::LinearImpl;
  // Shares the parameters of `other`; does not copy them.
  explicit LinearImpl(const torch::nn::LinearImpl& other) : torch::nn::LinearImpl(other) {}

  at::Tensor forward(const at::Tensor& input);
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override;
};
TORCH_MODULE(Linear);

// Linear followed by GELU, with a Linear's parameters and names.
class LinearGELUImpl : public LinearImpl {
 public:
  using LinearImpl::LinearImpl;
  explicit LinearGELUImpl(const torch::nn::LinearImpl& other) : LinearImpl(other) {}

  at::Tensor forward(const at::Tensor& input);
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override;
};
TORCH_MODULE(LinearGELU);

// The same as functions; `bias` may be undefined.
at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias);
at::Tensor linear_gelu(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias);

}  // namespace lockstep::nn

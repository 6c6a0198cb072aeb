// torch::nn::Linear whose forward is one call of at::linear.
//
//   lockstep::nn::Linear fc(768, 3072);                     // or Unit<nn::Linear>
//
// LibTorch's own goes through torch::nn::functional::linear, which on input of three and more dimensions is a
// matmul and then a separate addition of the bias. Construction, first values and names are LibTorch's: it is
// derived from it, and takes its place wherever one is asked for. On CUDA its bias's gradient is a kernel of
// our own.
//
//   lockstep::nn::LinearGELU up(768, 3072);                 // gelu(linear(x)), with the tanh approximation
//
// On CUDA, backward of LinearGELU computes GELU's gradient and the bias's in one pass over memory.
#pragma once

#include <memory>
#include <optional>

#include <torch/nn/modules/linear.h>

namespace lockstep::nn {

class LinearImpl : public torch::nn::LinearImpl {
 public:
  using torch::nn::LinearImpl::LinearImpl;
  // Its parameters are the other's, not copies.
  explicit LinearImpl(const torch::nn::LinearImpl& other) : torch::nn::LinearImpl(other) {}

  at::Tensor forward(const at::Tensor& input);
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override;
};
TORCH_MODULE(Linear);

// With a Linear's parameters and names.
class LinearGELUImpl : public LinearImpl {
 public:
  using LinearImpl::LinearImpl;
  explicit LinearGELUImpl(const torch::nn::LinearImpl& other) : LinearImpl(other) {}

  at::Tensor forward(const at::Tensor& input);
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override;
};
TORCH_MODULE(LinearGELU);

// The same as functions; bias may be undefined.
at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias);
at::Tensor linear_gelu(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias);

}  // namespace lockstep::nn

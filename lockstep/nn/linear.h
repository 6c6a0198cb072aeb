// torch::nn::Linear whose forward is one call of at::linear.
//
//   lockstep::nn::Linear fc(768, 3072);                     // or Unit<nn::Linear>
//
// LibTorch's own goes through torch::nn::functional::linear, which on input of three and more dimensions is a
// matmul and then a separate addition of the bias. Construction, first values and names are LibTorch's: it is
// derived from it, and takes its place wherever one is asked for.
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

}  // namespace lockstep::nn

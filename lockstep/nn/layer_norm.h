// torch::nn::LayerNorm, with an optional addition before it in the same pass:
//
//   lockstep::nn::LayerNorm norm(torch::nn::LayerNormOptions({768}));
//   auto y = norm(x);
//   auto [sum, y] = norm->add(x, residual);     // sum = x + residual, y = norm(sum)
//
// On CUDA each takes one kernel in forward and one (plus a small one) in backward, including the gradients of
// weight and bias. It derives from LibTorch's class, with the same construction, initialisation and names, so
// it works wherever that does.
#pragma once

#include <memory>
#include <optional>
#include <utility>

#include <torch/nn/modules/normalization.h>

namespace lockstep::nn {

class LayerNormImpl : public torch::nn::LayerNormImpl {
 public:
  using torch::nn::LayerNormImpl::LayerNormImpl;
  // Shares the parameters of `other`; does not copy them.
  explicit LayerNormImpl(const torch::nn::LayerNormImpl& other) : torch::nn::LayerNormImpl(other) {}

  at::Tensor forward(const at::Tensor& input);
  // Returns the sum and the normalised sum. Throws ConfigError if either argument is undefined.
  std::pair<at::Tensor, at::Tensor> add(const at::Tensor& input, const at::Tensor& residual);
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override;
};
TORCH_MODULE(LayerNorm);

}  // namespace lockstep::nn

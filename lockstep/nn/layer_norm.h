// torch::nn::LayerNorm, and the sum before it in the same pass:
//
//   lockstep::nn::LayerNorm norm(torch::nn::LayerNormOptions({768}));
//   auto y = norm(x);
//   auto [sum, y] = norm->add(x, residual);     // sum = x + residual, y = norm(sum)
//
// On CUDA each is one kernel forward and one (and a small one) backward, with the gradients of weight and
// bias in it. Construction, first values and names are LibTorch's: it is derived from it, and takes its place
// wherever one is asked for.
#pragma once

#include <memory>
#include <optional>
#include <utility>

#include <torch/nn/modules/normalization.h>

namespace lockstep::nn {

class LayerNormImpl : public torch::nn::LayerNormImpl {
 public:
  using torch::nn::LayerNormImpl::LayerNormImpl;
  // Its parameters are the other's, not copies.
  explicit LayerNormImpl(const torch::nn::LayerNormImpl& other) : torch::nn::LayerNormImpl(other) {}

  at::Tensor forward(const at::Tensor& input);
  // The sum and the normalised. ConfigError where one of the two is undefined.
  std::pair<at::Tensor, at::Tensor> add(const at::Tensor& input, const at::Tensor& residual);
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override;
};
TORCH_MODULE(LayerNorm);

}  // namespace lockstep::nn

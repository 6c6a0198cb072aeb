// Root-mean-square normalisation over the last dimensions: y = x / sqrt(mean(x^2) + eps) * weight. LibTorch's
// C++ API has it as a function (at::rms_norm) but not as a module.
//
//   lockstep::nn::RMSNorm norm({768}, 1e-6);
#pragma once

#include <optional>
#include <ostream>
#include <utility>
#include <vector>

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

namespace lockstep::nn {

class RMSNormImpl : public torch::nn::Cloneable<RMSNormImpl> {
 public:
  // eps: defaults to the dtype's epsilon.
  explicit RMSNormImpl(std::vector<std::int64_t> shape, std::optional<double> given_eps = std::nullopt,
                       bool affine = true);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  at::Tensor forward(const at::Tensor& input);

  std::vector<std::int64_t> normalized_shape;
  std::optional<double> eps;
  at::Tensor weight;  // initially ones; undefined without affine

 private:
  bool affine_;
};

class RMSNorm : public torch::nn::ModuleHolder<RMSNormImpl> {
 public:
  using torch::nn::ModuleHolder<RMSNormImpl>::ModuleHolder;
  explicit RMSNorm(std::vector<std::int64_t> normalized_shape, std::optional<double> eps = std::nullopt,
                   bool affine = true)
      : ModuleHolder(std::make_shared<RMSNormImpl>(std::move(normalized_shape), eps, affine)) {}
};

}  // namespace lockstep::nn

#include <lockstep/nn/rms_norm.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

namespace lockstep::nn {

RMSNormImpl::RMSNormImpl(std::vector<std::int64_t> shape, std::optional<double> given_eps, bool affine)
    : normalized_shape(std::move(shape)), eps(given_eps), affine_(affine) {
  reset();
}

void RMSNormImpl::reset() {
  weight = register_parameter("weight", affine_ ? at::ones(normalized_shape) : at::Tensor(),
                              /*requires_grad=*/affine_);
}

void RMSNormImpl::pretty_print(std::ostream& stream) const {
  stream << fmt::format("lockstep::nn::RMSNorm([{}])", fmt::join(normalized_shape, ", "));
}

at::Tensor RMSNormImpl::forward(const at::Tensor& input) {
  return at::rms_norm(input, normalized_shape, weight, eps);
}

}  // namespace lockstep::nn

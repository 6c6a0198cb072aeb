#include <lockstep/nn/layer_norm.h>

#include <ATen/ATen.h>
#include <lockstep/nn/detail/fused.h>
#include <torch/csrc/autograd/custom_function.h>

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Inputs: x, residual, weight, bias, eps, columns. Returns the normalised tensor and, with a residual, the
// sum.
class FusedLayerNorm : public torch::autograd::Function<FusedLayerNorm> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& given_x,
                               const std::optional<at::Tensor>& given_residual,
                               const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
                               double eps, std::int64_t columns) {
    const auto x = detail::dense(given_x);
    const auto residual = given_residual ? detail::dense(*given_residual) : at::Tensor();
    const auto rows = x.numel() / columns;
    const auto sum = residual.defined() ? at::empty_like(x) : x;
    auto out = at::empty_like(x);
    const auto mean = detail::scratch_of(x, static_cast<std::size_t>(rows)), rstd = at::empty_like(mean);
    kernels::layer_norm({.number = detail::number_of(x),
                         .rows = rows,
                         .columns = columns,
                         .x = x.const_data_ptr(),
                         .residual = detail::data(residual),
                         .weight = weight ? weight->const_data_ptr() : nullptr,
                         .bias = bias ? bias->const_data_ptr() : nullptr,
                         .eps = eps,
                         .sum = residual.defined() ? sum.mutable_data_ptr() : nullptr,
                         .out = out.mutable_data_ptr(),
                         .mean = mean.mutable_data_ptr<float>(),
                         .rstd = rstd.mutable_data_ptr<float>()},
                        detail::stream_of(x));
    context->save_for_backward({sum, mean, rstd, weight.value_or(at::Tensor())});
    context->saved_data["columns"] = columns;
    context->saved_data["residual"] = residual.defined();
    context->set_materialize_grads(false);
    if (residual.defined()) return {out, sum};
    return {out};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    detail::refuse_second_derivative("nn::LayerNorm");
    const bool residual = context->saved_data["residual"].toBool();
    const auto& through = gradients[0];
    const auto along = residual ? gradients[1] : at::Tensor();
    at::Tensor of_x = along, of_weight, of_bias;
    if (through.defined()) {
      const auto saved = context->get_saved_variables();
      const auto &sum = saved[0], &weight = saved[3];
      const c10::DeviceGuard device(sum.device());
      const auto columns = context->saved_data["columns"].toInt(), rows = sum.numel() / columns;
      const auto dout = detail::dense(through);
      const auto dsum = along.defined() ? detail::dense(along) : at::Tensor();
      of_x = at::empty_like(sum);
      if (weight.defined()) of_weight = at::empty_like(weight), of_bias = at::empty_like(weight);
      const auto scratch = detail::scratch_of(sum, kernels::layer_norm_scratch(rows, columns));
      kernels::layer_norm_gradient({.number = detail::number_of(sum),
                                    .rows = rows,
                                    .columns = columns,
                                    .dout = dout.const_data_ptr(),
                                    .dsum = detail::data(dsum),
                                    .sum = sum.const_data_ptr(),
                                    .weight = detail::data(weight),
                                    .mean = saved[1].const_data_ptr<float>(),
                                    .rstd = saved[2].const_data_ptr<float>(),
                                    .dx = of_x.mutable_data_ptr(),
                                    .dweight = detail::mutable_data(of_weight),
                                    .dbias = detail::mutable_data(of_bias),
                                    .scratch = scratch.mutable_data_ptr<float>()},
                                   detail::stream_of(sum));
    }
    return {of_x, residual ? of_x : at::Tensor(), of_weight, of_bias, at::Tensor(), at::Tensor()};
  }
};

std::int64_t columns_of(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

bool is_whole(const at::Tensor& parameter, at::IntArrayRef shape) {
  return !parameter.defined() || (parameter.sizes() == shape && detail::is_dense(parameter));
}

bool use_kernels(const LayerNormImpl& norm, const at::Tensor& input, const at::Tensor& residual) {
  const auto& shape = norm.options.normalized_shape();
  const auto columns = columns_of(shape);
  return input.defined() && detail::has_kernel(input) &&
         detail::alike({&input, &residual, &norm.weight, &norm.bias}) &&
         norm.weight.defined() == norm.bias.defined() && is_whole(norm.weight, shape) &&
         is_whole(norm.bias, shape) && columns > 0 && columns % kernels::kColumnStep == 0 &&
         columns <= kernels::kMostNormColumns && input.dim() >= static_cast<std::int64_t>(shape.size()) &&
         input.sizes().slice(input.sizes().size() - shape.size()) == at::IntArrayRef(shape) &&
         (!residual.defined() || residual.sizes() == input.sizes());
}

variable_list fused(const LayerNormImpl& norm, const at::Tensor& input, const at::Tensor& residual) {
  const c10::DeviceGuard device(input.device());
  const auto given = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional(tensor) : std::nullopt;
  };
  return FusedLayerNorm::apply(input, given(residual), given(norm.weight), given(norm.bias),
                               norm.options.eps(), columns_of(norm.options.normalized_shape()));
}

}  // namespace

at::Tensor LayerNormImpl::forward(const at::Tensor& input) {
  return use_kernels(*this, input, {}) ? fused(*this, input, {})[0]
                                       : torch::nn::LayerNormImpl::forward(input);
}

std::pair<at::Tensor, at::Tensor> LayerNormImpl::add(const at::Tensor& input, const at::Tensor& residual) {
  if (!input.defined() || !residual.defined())
    throw ConfigError(
        fmt::format("nn::LayerNorm::add: the {} is undefined; to normalise one tensor, call forward",
                    input.defined() ? "residual" : "input"));
  if (use_kernels(*this, input, residual)) {
    auto results = fused(*this, input, residual);
    return {std::move(results[1]), std::move(results[0])};
  }
  auto sum = input + residual;
  auto normalised = torch::nn::LayerNormImpl::forward(sum);
  return {std::move(sum), std::move(normalised)};
}

std::shared_ptr<torch::nn::Module> LayerNormImpl::clone(const std::optional<at::Device>& device) const {
  // LibTorch's clone() returns LibTorch's type, so convert it.
  return std::make_shared<LayerNormImpl>(
      dynamic_cast<const torch::nn::LayerNormImpl&>(*torch::nn::LayerNormImpl::clone(device)));
}

}  // namespace lockstep::nn

#include <lockstep/nn/linear.h>

#include <ATen/ATen.h>
#include <lockstep/nn/detail/fused.h>
#include <torch/csrc/autograd/custom_function.h>

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Uses LibTorch's matrix products, and Lockstep's kernels for the rest.
class FusedLinear : public torch::autograd::Function<FusedLinear> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, bool gelu) {
    const auto rows = input.reshape({-1, weight.size(1)});
    auto before = bias ? at::addmm(*bias, rows, weight.t()) : at::mm(rows, weight.t());
    auto after = before;
    if (gelu) {
      after = at::empty_like(before);
      kernels::gelu(detail::number_of(before), before.const_data_ptr(), before.numel(),
                    after.mutable_data_ptr(), detail::stream_of(before));
    }
    // As in LibTorch, each is saved only if the other needs a gradient; otherwise it may change in place.
    context->save_for_backward({weight.requires_grad() ? input : at::Tensor(),
                                input.requires_grad() ? weight : at::Tensor(), gelu ? before : at::Tensor()});
    context->saved_data["bias"] = bias.has_value();
    context->saved_data["columns"] = weight.size(0);
    auto sizes = input.sizes().vec();
    context->saved_data["sizes"] = sizes;
    sizes.back() = weight.size(0);
    return at::_unsafe_view(after, sizes);  // not a view for autograd: it may be changed in place
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto &input = saved[0], &weight = saved[1], &before = saved[2];
    if (before.defined()) detail::refuse_second_derivative("nn::LinearGELU");
    const auto columns = context->saved_data["columns"].toInt();
    auto gradient = detail::dense(gradients[0].reshape({-1, columns}));
    const c10::DeviceGuard device(gradient.device());
    const auto stream = detail::stream_of(gradient);
    const auto number = detail::number_of(gradient);
    at::Tensor bias, scratch;
    const bool wants_bias = context->saved_data["bias"].toBool() && context->needs_input_grad(2);
    if (wants_bias) bias = at::empty({columns}, gradient.options());
    if (wants_bias || before.defined())
      scratch = detail::scratch_of(gradient, kernels::column_sum_scratch(gradient.size(0), columns));
    if (before.defined()) {
      auto inner = at::empty_like(gradient);
      kernels::gelu_gradient(number, before.const_data_ptr(), gradient.const_data_ptr(), gradient.size(0),
                             columns, inner.mutable_data_ptr(), detail::mutable_data(bias),
                             scratch.mutable_data_ptr<float>(), stream);
      gradient = std::move(inner);
    } else if (wants_bias && at::GradMode::is_enabled()) {
      bias = gradient.sum(0);  // differentiable, unlike the kernel
    } else if (wants_bias) {
      kernels::column_sums(number, gradient.const_data_ptr(), gradient.size(0), columns,
                           bias.mutable_data_ptr(), scratch.mutable_data_ptr<float>(), stream);
    }
    at::Tensor of_input, of_weight;
    const auto sizes = context->saved_data["sizes"].toIntVector();
    if (context->needs_input_grad(0)) of_input = at::mm(gradient, weight).view(sizes);
    if (context->needs_input_grad(1)) of_weight = at::mm(gradient.t(), input.reshape({-1, sizes.back()}));
    return {of_input, of_weight, bias, at::Tensor()};
  }
};

bool use_kernels(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  return input.defined() && detail::has_kernel(input) && detail::alike({&input, &weight, &bias}) &&
         weight.dim() == 2 && input.dim() >= 1 && input.size(-1) == weight.size(1) && weight.size(0) > 0 &&
         weight.size(0) % kernels::kColumnStep == 0 && (!bias.defined() || bias.is_contiguous());
}

at::Tensor fused(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, bool gelu) {
  const c10::DeviceGuard device(input.device());
  return FusedLinear::apply(input, weight, bias.defined() ? std::optional(bias) : std::nullopt, gelu);
}

template <typename Module>
std::shared_ptr<torch::nn::Module> clone_as(const torch::nn::LinearImpl& module,
                                            const std::optional<at::Device>& device) {
  // LibTorch's clone() returns LibTorch's type, so convert it.
  return std::make_shared<Module>(
      dynamic_cast<const torch::nn::LinearImpl&>(*module.torch::nn::LinearImpl::clone(device)));
}

}  // namespace

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  return use_kernels(input, weight, bias) ? fused(input, weight, bias, false)
                                          : at::linear(input, weight, bias);
}

at::Tensor linear_gelu(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  return use_kernels(input, weight, bias) ? fused(input, weight, bias, true)
                                          : at::gelu(at::linear(input, weight, bias), "tanh");
}

at::Tensor LinearImpl::forward(const at::Tensor& input) { return linear(input, weight, bias); }
std::shared_ptr<torch::nn::Module> LinearImpl::clone(const std::optional<at::Device>& device) const {
  return clone_as<LinearImpl>(*this, device);
}

at::Tensor LinearGELUImpl::forward(const at::Tensor& input) { return linear_gelu(input, weight, bias); }
std::shared_ptr<torch::nn::Module> LinearGELUImpl::clone(const std::optional<at::Device>& device) const {
  return clone_as<LinearGELUImpl>(*this, device);
}

}  // namespace lockstep::nn

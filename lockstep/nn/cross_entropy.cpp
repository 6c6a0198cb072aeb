#include <lockstep/nn/cross_entropy.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <lockstep/base/log.h>
#include <lockstep/nn/detail/fused.h>
#include <torch/csrc/autograd/custom_function.h>

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Divisor of the summed losses, on the device.
at::Tensor divisor_of(const at::Tensor& targets, std::int64_t ignore_index, bool mean) {
  const auto options = targets.options().dtype(at::kFloat);
  return mean ? at::ne(targets, ignore_index).sum().to(at::kFloat) : at::ones({}, options);
}
// Divides gradients. If no row counts, the loss is NaN as in LibTorch, and gradients are zeros rather than 0
// / 0.
at::Tensor divided(const at::Tensor& gradient, const at::Tensor& divisor) {
  return gradient.div(divisor.clamp_min(1));
}

// Number of classes, rounded up to a multiple of what the kernels process at a time.
std::int64_t columns_of(std::int64_t classes) {
  return (classes + kernels::kColumnStep - 1) / kernels::kColumnStep * kernels::kColumnStep;
}

// logits: rows of columns_of(classes) elements; those past the classes are -inf.
void entropy(const at::Tensor& logits, std::int64_t classes, const at::Tensor& targets,
             std::int64_t ignore_index, double smoothing, const at::Tensor& losses,
             const at::Tensor& gradient, const at::Tensor& scale) {
  kernels::cross_entropy({.number = detail::number_of(logits),
                          .rows = logits.size(0),
                          .classes = classes,
                          .columns = logits.size(1),
                          .logits = logits.const_data_ptr(),
                          .targets = targets.const_data_ptr<std::int64_t>(),
                          .ignore_index = ignore_index,
                          .label_smoothing = smoothing,
                          .losses = static_cast<float*>(detail::mutable_data(losses)),
                          .gradient = detail::mutable_data(gradient),
                          .scale = static_cast<const float*>(detail::data(scale))},
                         detail::stream_of(logits));
}

class FusedCrossEntropy : public torch::autograd::Function<FusedCrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits, const at::Tensor& targets,
                            std::int64_t ignore_index, double smoothing, bool mean) {
    const auto losses = detail::scratch_of(logits, static_cast<std::size_t>(logits.size(0)));
    const auto divisor = divisor_of(targets, ignore_index, mean);
    entropy(logits, logits.size(1), targets, ignore_index, smoothing, losses, {}, {});
    context->save_for_backward({logits, targets, divisor});
    context->saved_data["ignore_index"] = ignore_index;
    context->saved_data["smoothing"] = smoothing;
    return losses.sum().div_(divisor).to(logits.scalar_type());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    detail::refuse_second_derivative("nn::cross_entropy");
    const auto saved = context->get_saved_variables();
    const c10::DeviceGuard device(saved[0].device());
    auto gradient = at::empty_like(saved[0]);
    entropy(saved[0], saved[0].size(1), saved[1], context->saved_data["ignore_index"].toInt(),
            context->saved_data["smoothing"].toDouble(), {}, gradient, divided(gradients[0], saved[2]));
    return {gradient, {}, {}, {}, {}};
  }
};

// sum (+)= a^T b, accumulated in float.
void add_product(const at::Tensor& sum, bool first, const at::Tensor& a, const at::Tensor& b) {
  auto out = sum;
  if (a.scalar_type() == at::kFloat)
    first ? at::mm_out(out, a.t(), b) : at::addmm_out(out, sum, a.t(), b);
  else
    first ? at::mm_out(out, a.t(), b, at::kFloat) : at::addmm_out(out, sum, a.t(), b, at::kFloat);
}

class FusedLinearCrossEntropy : public torch::autograd::Function<FusedLinearCrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& hidden, const at::Tensor& weight,
                            const at::Tensor& targets, std::int64_t ignore_index, double smoothing, bool mean,
                            std::int64_t chunk_bytes, bool of_hidden, bool of_weight) {
    const auto rows = hidden.size(0), classes = weight.size(0), columns = columns_of(classes);
    const auto losses = detail::scratch_of(hidden, static_cast<std::size_t>(rows));
    const auto divisor = divisor_of(targets, ignore_index, mean);
    at::Tensor hidden_gradient, weight_gradient;
    if (of_hidden) hidden_gradient = at::empty_like(hidden);
    if (of_weight) weight_gradient = at::empty(weight.sizes(), weight.options().dtype(at::kFloat));
    // Chunks of about the same size, with numbers of rows that suit matrix products.
    const auto row_bytes = columns * hidden.element_size();
    const auto parts = std::max<std::int64_t>(1, (rows * row_bytes + chunk_bytes - 1) / chunk_bytes);
    const auto step = std::min(rows, ((rows + parts - 1) / parts + 127) / 128 * 128);
    for (std::int64_t row = 0; row < rows; row += step) {
      const auto count = std::min(step, rows - row);
      const auto some = hidden.narrow(0, row, count);
      const auto padded = at::empty({count, columns}, some.options());
      auto logits = padded.narrow(1, 0, classes);
      at::mm_out(logits, some, weight.t());
      if (columns > classes) padded.slice(1, classes).fill_(-std::numeric_limits<double>::infinity());
      // Not scaled yet: in float16, one row's share of a mean would underflow.
      entropy(padded, classes, targets.narrow(0, row, count), ignore_index, smoothing,
              losses.narrow(0, row, count), of_hidden || of_weight ? padded : at::Tensor(), {});
      if (of_hidden) {
        auto out = hidden_gradient.narrow(0, row, count);
        at::mm_out(out, logits, weight);
      }
      if (of_weight) add_product(weight_gradient, row == 0, logits, some);
    }
    context->save_for_backward({hidden_gradient, weight_gradient, divisor});
    context->saved_data["type"] = weight.scalar_type();
    return losses.sum().div_(divisor);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    detail::refuse_second_derivative("nn::linear_cross_entropy");
    const auto saved = context->get_saved_variables();
    const c10::DeviceGuard device(saved[2].device());
    const auto factor = divided(gradients[0], saved[2]);
    at::Tensor of_hidden, of_weight;
    if (saved[0].defined() && context->needs_input_grad(0)) of_hidden = saved[0].mul(factor);
    if (saved[1].defined() && context->needs_input_grad(1)) {
      const auto& sum = saved[1];
      of_weight = at::empty(sum.sizes(), sum.options().dtype(context->saved_data["type"].toScalarType()));
      kernels::scale(sum.const_data_ptr<float>(), sum.numel(), factor.const_data_ptr<float>(),
                     detail::number_of(of_weight), of_weight.mutable_data_ptr(), detail::stream_of(sum));
    }
    return {of_hidden, of_weight, {}, {}, {}, {}, {}, {}, {}};
  }
};

std::string shape_text(const at::Tensor& tensor) {
  return tensor.defined() ? fmt::format("[{}]", fmt::join(tensor.sizes(), ", ")) : "nothing";
}

void check(const at::Tensor& rows, const at::Tensor& targets, const CrossEntropyOptions& options) {
  if (!(options.label_smoothing >= 0 && options.label_smoothing <= 1))
    throw ConfigError(
        fmt::format("cross_entropy: label_smoothing: expected 0 to 1, got {}", options.label_smoothing));
  if (options.chunk_bytes < 1)
    throw ConfigError(
        fmt::format("linear_cross_entropy: chunk_bytes: expected at least 1, got {}", options.chunk_bytes));
  if (!rows.defined() || !targets.defined() || rows.dim() < 2 || targets.scalar_type() != at::kLong ||
      rows.sizes().slice(0, rows.dim() - 1) != targets.sizes())
    throw ConfigError(fmt::format(
        "cross_entropy: expected one int64 target for each row of logits, got logits {} and targets {} {}",
        shape_text(rows), targets.defined() ? c10::toString(targets.scalar_type()) : "",
        shape_text(targets)));
}

at::Tensor plain(const at::Tensor& logits, const at::Tensor& targets, const CrossEntropyOptions& options) {
  return at::cross_entropy_loss(logits, targets, {}, options.mean ? at::Reduction::Mean : at::Reduction::Sum,
                                options.ignore_index, options.label_smoothing);
}

// Logged once: callers of linear_cross_entropy expect it to save memory.
void say_that_all_logits_are_held(const at::Tensor& rows, const at::Tensor& weight) {
  static std::atomic_flag said;
  if (!rows.is_cuda() || rows.numel() == 0 || said.test_and_set()) return;
  lockstep::detail::log(LogLevel::warn,
                        "nn::linear_cross_entropy: {} {} with weight {} {}{}{} holds all logits at once "
                        "instead of chunk_bytes at a time; that needs both tensors in the same type of "
                        "float32, bfloat16 and float16, a weight of a multiple of {} elements, kernels for "
                        "this GPU, and no Autocast",
                        c10::toString(rows.scalar_type()), shape_text(rows),
                        c10::toString(weight.scalar_type()), shape_text(weight),
                        at::autocast::is_autocast_enabled(at::kCUDA) ? " under Autocast" : "",
                        kernels::available() ? "" : " without kernels for this GPU", kernels::kColumnStep);
}

}  // namespace

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         const CrossEntropyOptions& options) {
  check(logits, targets, options);
  const auto rows = logits.reshape({-1, logits.size(-1)});
  const auto flat = targets.reshape({-1});
  if (!detail::has_kernel(rows) || !detail::alike({&rows}) || flat.device() != rows.device() ||
      rows.size(1) % kernels::kColumnStep != 0)
    return plain(rows, flat, options);
  const c10::DeviceGuard device(rows.device());
  return FusedCrossEntropy::apply(detail::dense(rows), detail::dense(flat), options.ignore_index,
                                  options.label_smoothing, options.mean);
}

at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets,
                                const CrossEntropyOptions& options) {
  check(hidden, targets, options);
  if (!weight.defined() || weight.dim() != 2 || weight.size(1) != hidden.size(-1))
    throw ConfigError(
        fmt::format("linear_cross_entropy: weight: expected [classes, {}] for hidden {}, got {}",
                    hidden.size(-1), shape_text(hidden), shape_text(weight)));
  const auto rows = hidden.reshape({-1, hidden.size(-1)});
  const auto flat = targets.reshape({-1});
  if (!detail::has_kernel(rows) || flat.device() != rows.device() || !detail::alike({&rows, &weight}) ||
      weight.numel() == 0 || weight.numel() % kernels::kColumnStep != 0) {
    say_that_all_logits_are_held(rows, weight);
    return plain(at::linear(rows, weight), flat, options)
        .to(at::promote_types(rows.scalar_type(), at::kFloat));
  }
  const c10::DeviceGuard device(rows.device());
  const bool grads = at::GradMode::is_enabled();
  return FusedLinearCrossEntropy::apply(rows.contiguous(), weight.contiguous(), detail::dense(flat),
                                        options.ignore_index, options.label_smoothing, options.mean,
                                        options.chunk_bytes, grads && hidden.requires_grad(),
                                        grads && weight.requires_grad());
}

}  // namespace lockstep::nn

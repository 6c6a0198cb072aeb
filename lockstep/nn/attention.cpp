#include <lockstep/nn/attention.h>

#include <ATen/ATen.h>
#include <ATen/SDPBackend.h>
#include <fmt/ranges.h>
#include <lockstep/nn/detail/fused.h>
#include <torch/csrc/autograd/custom_function.h>

namespace lockstep::nn {
namespace {

using at::SDPBackend;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Heads {
  at::Tensor q, k, v;  // [batch, heads, length, size]
};

Heads heads_of(const at::Tensor& qkv, std::int64_t heads) {
  const auto size = qkv.size(2) / (3 * heads);
  const auto parts = qkv.view({qkv.size(0), qkv.size(1), 3, heads, size}).permute({2, 0, 3, 1, 4});
  return {parts[0], parts[1], parts[2]};
}

// Converts [batch, heads, length, size] to contiguous [batch, length, heads, size].
at::Tensor rows_of(const at::Tensor& seen) { return seen.transpose(1, 2).contiguous(); }

// LibTorch's choice of kernel for this shape: cuDNN's where it is the fastest and has no known faults.
SDPBackend choose(const Heads& h, const AttentionOptions& options) {
  // scaled_dot_product_attention pads other sizes itself.
  if (h.q.size(3) % 8 != 0) return SDPBackend::math;
  return static_cast<SDPBackend>(
      at::_fused_sdp_choice(h.q, h.k, h.v, {}, 0.0, options.causal, options.scale));
}

class FusedAttention : public torch::autograd::Function<FusedAttention> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& qkv, std::int64_t heads, bool causal,
                            std::optional<double> scale, bool cudnn) {
    const auto h = heads_of(qkv, heads);
    const auto [out, log_sums, cum_q, cum_k, max_q, max_k, seed, offset, debug] =
        cudnn ? at::_scaled_dot_product_cudnn_attention(h.q, h.k, h.v, {}, /*compute_log_sumexp=*/true, 0.0,
                                                        causal, false, scale)
              : at::_scaled_dot_product_flash_attention(h.q, h.k, h.v, 0.0, causal, false, scale);
    const auto rows = rows_of(out);
    // Not a view for autograd, because a Function must not return one. In-place changes are still detected:
    // the result itself is saved.
    auto result = at::_unsafe_view(rows, {rows.size(0), rows.size(1), rows.size(2) * rows.size(3)});
    context->save_for_backward({qkv, result, log_sums, cum_q, cum_k, seed, offset});
    auto& data = context->saved_data;
    data["heads"] = heads, data["causal"] = causal, data["scale"] = scale, data["cudnn"] = cudnn;
    data["max_q"] = max_q, data["max_k"] = max_k;
    return result;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    detail::refuse_second_derivative("nn::attention");
    auto& data = context->saved_data;
    const auto saved = context->get_saved_variables();
    const auto &qkv = saved[0], &log_sums = saved[2], &cum_q = saved[3], &cum_k = saved[4], &seed = saved[5],
               &offset = saved[6];
    const c10::DeviceGuard device(qkv.device());
    const auto heads = data["heads"].toInt();
    const auto h = heads_of(qkv, heads);
    const auto as_heads = [&](const at::Tensor& tensor) {
      return tensor.view({tensor.size(0), tensor.size(1), heads, h.q.size(3)}).transpose(1, 2);
    };
    const auto out = as_heads(saved[1]), gradient = as_heads(detail::dense(gradients[0]));
    const auto max_q = data["max_q"].toSymInt(), max_k = data["max_k"].toSymInt();
    const bool causal = data["causal"].toBool();
    const auto scale = data["scale"].toOptional<double>();
    const auto [dq, dk, dv] = data["cudnn"].toBool()
                                  ? at::_scaled_dot_product_cudnn_attention_backward_symint(
                                        gradient, h.q, h.k, h.v, out, log_sums, seed, offset, {}, cum_q,
                                        cum_k, max_q, max_k, 0.0, causal, scale)
                                  : at::_scaled_dot_product_flash_attention_backward_symint(
                                        gradient, h.q, h.k, h.v, out, log_sums, cum_q, cum_k, max_q, max_k,
                                        0.0, causal, seed, offset, scale);
    return {packed(qkv, {dq, dk, dv}), {}, {}, {}, {}};
  }

 private:
  static at::Tensor packed(const at::Tensor& qkv, const Heads& h) {
    auto result = at::empty_like(qkv);
    kernels::PackHeads pack{.number = detail::number_of(qkv),
                            .batch = h.q.size(0),
                            .heads = h.q.size(1),
                            .length = h.q.size(2),
                            .size = h.q.size(3),
                            .from = {},
                            .strides = {},
                            .to = result.mutable_data_ptr()};
    const std::int64_t unit = 16 / qkv.element_size();
    bool fits = pack.size % unit == 0;
    int which = 0;
    for (const auto* each : {&h.q, &h.k, &h.v}) {
      fits =
          fits && each->stride(3) == 1 && reinterpret_cast<std::uintptr_t>(each->const_data_ptr()) % 16 == 0;
      for (int axis = 0; axis < 3; ++axis) {
        pack.strides[which][axis] = each->stride(axis);
        fits = fits && each->stride(axis) % unit == 0;
      }
      pack.from[which++] = each->const_data_ptr();
    }
    if (fits)
      kernels::pack_heads(pack, detail::stream_of(qkv));
    else
      at::stack_out(result = result.view({pack.batch, pack.length, 3, pack.heads, pack.size}),
                    {h.q.transpose(1, 2), h.k.transpose(1, 2), h.v.transpose(1, 2)}, 2);
    return result.view(qkv.sizes());
  }
};

}  // namespace

at::Tensor attention(const at::Tensor& qkv, const AttentionOptions& options) {
  if (options.heads < 1)
    throw ConfigError(fmt::format("attention: heads: expected at least 1, got {}", options.heads));
  if (!qkv.defined() || qkv.dim() != 3 || qkv.size(2) % (3 * options.heads) != 0)
    throw ConfigError(fmt::format(
        "attention: expected queries, keys and values side by side, [batch, length, 3 * {} * size], got [{}]",
        options.heads, qkv.defined() ? fmt::format("{}", fmt::join(qkv.sizes(), ", ")) : "undefined"));
  const auto dense = detail::dense(qkv);  // LibTorch's kernels also need alignment to 16 bytes
  if (detail::has_kernel(qkv) && detail::alike({&qkv})) {
    const c10::DeviceGuard device(qkv.device());
    const auto choice = choose(heads_of(dense, options.heads), options);
    const bool cudnn = choice == SDPBackend::cudnn_attention;
    if (cudnn || choice == SDPBackend::flash_attention)
      return FusedAttention::apply(dense, options.heads, options.causal, options.scale, cudnn);
  }
  const auto h = heads_of(dense, options.heads);
  // A view, so that LibTorch detects in-place changes through it to what its backward has saved.
  auto result =
      rows_of(at::scaled_dot_product_attention(h.q, h.k, h.v, {}, 0.0, options.causal, options.scale))
          .flatten(2);
  if (result.is_cuda() && result.requires_grad())
    result.register_hook([](const at::Tensor& gradient) { return detail::dense(gradient); });
  return result;
}

}  // namespace lockstep::nn

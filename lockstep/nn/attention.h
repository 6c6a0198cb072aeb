// Attention over queries, keys and values that one layer gave side by side:
//
//   auto seen = lockstep::nn::attention(qkv(x), {.heads = 12, .causal = true});
//   // [batch, length, 3 * width] -> [batch, length, width]
//
// LibTorch's scaled_dot_product_attention does the work, with the kernel that it chooses. On CUDA, where that
// is cuDNN's or FlashAttention (bfloat16 and float16), backward writes the three gradients side by side at
// once. Not there: masks of one's own, dropout, keys and values with fewer heads.
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

namespace lockstep::nn {

struct AttentionOptions {
  std::int64_t heads = 1;
  bool causal = false;                         // each position sees those up to itself, not all
  std::optional<double> scale = std::nullopt;  // of the products; 1 / sqrt(size of a head) without one
};

// ConfigError where qkv is not [batch, length, 3 * heads * size].
at::Tensor attention(const at::Tensor& qkv, const AttentionOptions& options);

}  // namespace lockstep::nn

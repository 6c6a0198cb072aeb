// Attention over queries, keys and values that one layer produced side by side:
//
//   auto seen = lockstep::nn::attention(qkv(x), {.heads = 12, .causal = true});
//   // [batch, length, 3 * width] -> [batch, length, width]
//
// Calls LibTorch's scaled_dot_product_attention and uses the kernel that it chooses. On CUDA, if that is
// cuDNN's or FlashAttention's (bfloat16 and float16), backward writes the three gradients side by side in one
// pass. Not supported: custom masks, dropout, and fewer heads for keys and values.
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

namespace lockstep::nn {

struct AttentionOptions {
  std::int64_t heads = 1;
  bool causal = false;                         // each position attends only to itself and earlier ones
  std::optional<double> scale = std::nullopt;  // of the products; nullopt: 1 / sqrt(head size)
};

// Throws ConfigError unless qkv is [batch, length, 3 * heads * size].
at::Tensor attention(const at::Tensor& qkv, const AttentionOptions& options);

}  // namespace lockstep::nn

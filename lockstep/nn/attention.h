// Attention over queries, keys and values that one layer gave side by side:
//
//   auto seen = lockstep::nn::attention(qkv(x), {.heads = 12});     // [batch, length, 3 * width] -> [batch,
//   length, width]
//
// LibTorch's scaled_dot_product_attention does the work. On CUDA the fastest of its kernels for the device is
// chosen (cuDNN's, where it serves), and backward writes the three gradients side by side at once.
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

namespace lockstep::nn {

struct AttentionOptions {
  std::int64_t heads = 1;
  bool causal = true;                          // each position sees those up to itself
  std::optional<double> scale = std::nullopt;  // of the products; 1 / sqrt(size of a head) without one
};

// ConfigError where qkv is not [batch, length, 3 * heads * size].
at::Tensor attention(const at::Tensor& qkv, const AttentionOptions& options);

}  // namespace lockstep::nn

// Cross-entropy of classes, as torch::nn::functional::cross_entropy gives it.
//
//   auto loss = lockstep::nn::cross_entropy(logits, targets);                    // [rows, classes], [rows]
//   auto loss = lockstep::nn::linear_cross_entropy(hidden, head->weight, targets);
//
// The first never holds logits in another type than they come in: on CUDA logits of bfloat16 are read as
// floats inside a kernel. The second is the layer before it too: logits exist for some rows at a time, and
// what they need of backward's work is done in forward, so that their gradient takes their place. For 32,768
// rows of 50,304 classes that is 0.8 instead of 6.6 GB.
//
// The first's result is of the logits' type, as LibTorch's; the second's is float32 at least.
//
// Targets that are ignore_index count for nothing; others that are no class are an error on the CPU and give
// NaN on CUDA, where nobody waits for the device to tell.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace lockstep::nn {

struct CrossEntropyOptions {
  std::int64_t ignore_index = -100;
  double label_smoothing = 0;
  bool mean = true;                                  // over the rows that count; else their sum
  std::int64_t chunk_bytes = std::int64_t{1} << 30;  // of logits at a time, in linear_cross_entropy
};

// Leading dimensions of logits are rows. ConfigError for shapes and options that do not fit.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         const CrossEntropyOptions& options = {});
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets,
                                const CrossEntropyOptions& options = {});

}  // namespace lockstep::nn

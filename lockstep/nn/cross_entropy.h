// Cross-entropy of classes, as torch::nn::functional::cross_entropy gives it for [rows, classes]. Classes are
// the last dimension and all before it are rows, while LibTorch's are dimension 1. Targets are classes'
// numbers. Not there: weights of classes, probabilities as targets, a loss for each row (Reduction::None).
//
//   auto loss = lockstep::nn::cross_entropy(logits, targets);                    // [..., classes], [...]
//   auto loss = lockstep::nn::linear_cross_entropy(hidden, head->weight, targets);
//
// On CUDA, in float32, bfloat16 and float16 and outside Autocast, kernels of our own do it:
//
// - cross_entropy, where classes are a multiple of 8, holds no logits in another type than they come in: they
//   are read as floats inside a kernel.
// - linear_cross_entropy, where hidden and weight are of one type and the weight has a multiple of 8
//   elements, is the layer before it too: logits exist for some rows at a time (chunk_bytes), and what they
//   need of backward's work is done in forward, so that their gradient takes their place. For 32,768 rows of
//   50,304 classes that is 0.8 instead of 6.6 GB.
//
// Elsewhere LibTorch's operators do it, of all logits at once; linear_cross_entropy says so once, on CUDA.
//
// The first's result is of the logits' type, as LibTorch's; the second's is float32 at least. Where no target
// counts, the mean is NaN and gradients are zeros, as LibTorch's.
//
// Targets that are ignore_index count for nothing. Others that are no class are an error on the CPU; our
// kernels give NaN, since nobody waits for the device to tell; LibTorch's end with an assert on the device.
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

// ConfigError for shapes and options that do not fit.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         const CrossEntropyOptions& options = {});
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets,
                                const CrossEntropyOptions& options = {});

}  // namespace lockstep::nn

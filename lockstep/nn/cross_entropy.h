// Cross-entropy of classes, equal to torch::nn::functional::cross_entropy on [rows, classes]. Classes are the
// last dimension, and all dimensions before it are rows; in LibTorch classes are dimension 1. Targets are
// class indices. Not supported: class weights, probabilities as targets, and one loss per row
// (Reduction::None).
//
//   auto loss = lockstep::nn::cross_entropy(logits, targets);                    // [..., classes], [...]
//   auto loss = lockstep::nn::linear_cross_entropy(hidden, head->weight, targets);
//
// On CUDA, in float32, bfloat16 and float16 and outside Autocast, Lockstep's own kernels are used:
//
// - cross_entropy, if the number of classes is a multiple of 8, reads the logits as floats inside the kernel
// and
//   makes no copy of them in another type.
// - linear_cross_entropy, if hidden and weight have the same type and the weight has a multiple of 8
// elements,
//   includes the layer before the loss. It computes the logits of some rows at a time (chunk_bytes) and does
//   their part of backward during forward, so that their gradient overwrites them. For 32,768 rows of 50,304
//   classes that takes 0.8 instead of 6.6 GB.
//
// Otherwise LibTorch's operators compute all logits at once; on CUDA linear_cross_entropy logs that once.
//
// The result of cross_entropy has the type of the logits, as in LibTorch; that of linear_cross_entropy is at
// least float32. If no target counts, the mean is NaN and gradients are zeros, as in LibTorch.
//
// Targets equal to ignore_index do not count. Any other target that is not a class is an error on the CPU.
// Lockstep's kernels yield NaN for it, because reporting it would need a wait for the device; LibTorch's end
// with a device-side assert.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace lockstep::nn {

struct CrossEntropyOptions {
  std::int64_t ignore_index = -100;
  double label_smoothing = 0;
  bool mean = true;                                  // average over the rows that count; false: their sum
  std::int64_t chunk_bytes = std::int64_t{1} << 30;  // memory for logits at a time, in linear_cross_entropy
};

// Throw ConfigError for invalid shapes and options.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         const CrossEntropyOptions& options = {});
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets,
                                const CrossEntropyOptions& options = {});

}  // namespace lockstep::nn

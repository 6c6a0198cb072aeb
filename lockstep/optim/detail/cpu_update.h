// Runs the updates of update.h on LibTorch's tensors, using LibTorch's threads.
#pragma once

#include <initializer_list>
#include <span>

#include <ATen/core/Tensor.h>
#include <lockstep/optim/update/update.h>

namespace lockstep::detail {

// True if all are float32, in host memory, dense, and laid out alike, so that they can be processed as
// arrays.
bool rows_alike(const at::Tensor& parameter, std::initializer_list<const at::Tensor*> others);

// Square roots are computed by LibTorch.
void cpu_update(std::span<const AdamSlice> slices);
void cpu_update(std::span<const SgdSlice> slices);

// The tensor that a Python number becomes: Python's tensor.mul_(0.9) is tensor.mul_(as_in_python(0.9)) here.
// mul_ with a plain number gives other bits for bfloat16 and float16, because LibTorch rounds the number
// first.
at::Tensor as_in_python(double number);

// True if cpu_update gives the bits of LibTorch's operations here; tested once. This depends on how LibTorch
// was compiled and on the kernels that it selects for this CPU: without fused multiply-add the bits differ.
bool adam_sweep_is_exact();
bool sgd_sweep_is_exact();

// Deterministic test numbers of every kind that an update may meet, for comparing with LibTorch.
at::Tensor probe_numbers(std::int64_t count, std::uint32_t seed, float scale);
// Compares bit by bit, but treats all NaNs as equal.
bool same_bits(const at::Tensor& a, const at::Tensor& b);

}  // namespace lockstep::detail

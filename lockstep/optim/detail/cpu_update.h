// Runs the updates of update.h over LibTorch's tensors, on LibTorch's threads.
#pragma once

#include <initializer_list>
#include <span>

#include <ATen/core/Tensor.h>
#include <lockstep/optim/update/update.h>

namespace lockstep::detail {

// Whether all are float32 in this process's memory, without holes and laid out alike: then they can be walked
// through as rows of numbers.
bool rows_alike(const at::Tensor& parameter, std::initializer_list<const at::Tensor*> others);

// Square roots are LibTorch's.
void cpu_update(std::span<const AdamSlice> slices);
void cpu_update(std::span<const SgdSlice> slices);

// What a Python number becomes: tensor.mul_(0.9) in Python is tensor.mul_(as_in_python(0.9)) here. mul_ with
// a plain number gives other bits for bfloat16 and float16: LibTorch rounds the number to them first.
at::Tensor as_in_python(double number);

// Whether the sweep gives the bits of LibTorch's operations here, which is tried once. It depends on how
// LibTorch was compiled, and on which of its kernels this CPU runs: without a fused multiply-add the bits are
// others.
bool adam_sweep_is_exact();
bool sgd_sweep_is_exact();

// Numbers of every kind that an update may meet, the same ones every time: for comparing with LibTorch.
at::Tensor probe_numbers(std::int64_t count, std::uint32_t seed, float scale);
// Every bit, but all NaNs count as one.
bool same_bits(const at::Tensor& a, const at::Tensor& b);

}  // namespace lockstep::detail

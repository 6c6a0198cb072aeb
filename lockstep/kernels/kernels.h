// CUDA kernels behind comm/, nn/ and train/, for code that includes no CUDA. Pointers are to memory of the
// current device, rows are dense, work goes to the stream and nobody waits. Sums are in an order that does
// not change from run to run. Built where there is nvcc and LibTorch has CUDA; elsewhere available() is
// false, and nothing else is called.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace lockstep::kernels {

enum class Number : std::uint8_t { float32, bfloat16, float16 };
using Stream = void*;  // a cudaStream_t

bool available();

// Columns are taken 8 at a time: their number must be a multiple of it, and rows must lie on 16 bytes.
constexpr std::int64_t kColumnStep = 8;

// sums[c] = sum over rows of values[., c], added up in float. scratch: as many floats as column_sum_scratch
// says.
std::size_t column_sum_scratch(std::int64_t rows, std::int64_t columns);
void column_sums(Number number, const void* values, std::int64_t rows, std::int64_t columns, void* sums,
                 float* scratch, Stream stream);

// What one step of Adam multiplies with: train/update_kernels.h says what each is.
struct AdamFactors {
  float first_weight, second_keep, second_weight, step_size, root_divisor, eps, shrink, l2;
};
// What they follow from, with the number of the step.
struct AdamSettings {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled;  // AdamW
};
struct AdamTensor {
  void* parameter;  // becomes the master, rounded; not looked at where it is float32: the master is it
  const void* gradient;
  float *master, *exp_avg, *exp_avg_sq;
  float* max_exp_avg_sq;  // with amsgrad
  std::int64_t* step;     // on the device, with settings
  std::int64_t count;     // of elements, 1 at least
};
struct AdamCall {
  Number parameter, gradient;  // of all tensors; the gradient's is the parameter's, or float32
  bool amsgrad, maximize;
  AdamFactors factors;  // unless there are settings
  // Both on the device, where a graph that is replayed finds them changed: step counts and options. Steps are
  // counted up, and the factors, one for each tensor, are worked out in scratch.
  const AdamSettings* settings;
  AdamFactors* scratch;
};
void adam(const AdamCall& call, std::span<const AdamTensor> tensors, Stream stream);
void put_adam_settings(const AdamSettings& settings, AdamSettings* on_device, Stream stream);

}  // namespace lockstep::kernels

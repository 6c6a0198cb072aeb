// CUDA kernels behind comm/, nn/ and optim/, for code that includes no CUDA headers. Pointers refer to memory
// of the current device and rows are dense. Calls enqueue work on the stream and return without waiting. The
// order of sums is the same in every run. Built if nvcc is found and LibTorch has CUDA; otherwise available()
// returns false, and nothing else may be called.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace lockstep::kernels {

enum class Number : std::uint8_t { float32, bfloat16, float16 };
using Stream = void*;  // a cudaStream_t

// True if there is a GPU and the kernels were compiled for every GPU of this machine.
bool available();

// Kernels process 8 columns at a time: the number of columns must be a multiple of 8, and rows must be
// aligned to 16 bytes.
constexpr std::int64_t kColumnStep = 8;

// sums[c] = sum over rows of values[., c], accumulated in float. scratch: as many floats as
// column_sum_scratch returns.
std::size_t column_sum_scratch(std::int64_t rows, std::int64_t columns);
void column_sums(Number number, const void* values, std::int64_t rows, std::int64_t columns, void* sums,
                 float* scratch, Stream stream);

// ---- nn::LayerNorm ----
constexpr std::int64_t kMostNormColumns = 8192;
// sum = x + residual, out = (sum - mean) * rstd * weight + bias. Without a residual (null), `sum` may be null
// and x is used. weight and bias may both be null. mean and rstd: one float per row.
struct LayerNorm {
  Number number;
  std::int64_t rows, columns;
  const void *x, *residual, *weight, *bias;
  double eps;
  void *sum, *out;
  float *mean, *rstd;
};
void layer_norm(const LayerNorm& norm, Stream stream);

// dx = d(loss)/d(sum): the gradient through out, given as dout, plus dsum unless that is null. dweight and
// dbias may both be null.
struct LayerNormGradient {
  Number number;
  std::int64_t rows, columns;
  const void *dout, *dsum, *sum, *weight;
  const float *mean, *rstd;
  void *dx, *dweight, *dbias;
  float* scratch;
};
std::size_t layer_norm_scratch(std::int64_t rows, std::int64_t columns);
void layer_norm_gradient(const LayerNormGradient& norm, Stream stream);

// ---- nn::LinearGELU ---- (with tanh)
void gelu(Number number, const void* x, std::int64_t count, void* out, Stream stream);
// dx, and unless dbias is null, its sums over rows as in column_sums: the gradient of the preceding bias.
void gelu_gradient(Number number, const void* x, const void* dout, std::int64_t rows, std::int64_t columns,
                   void* dx, void* dbias, float* scratch, Stream stream);

// ---- nn::cross_entropy ----
// losses[r] = -log softmax(logits[r])[targets[r]]; 0 for an ignored target; NaN for a target that is not a
// class. gradient is (softmax - one_hot) * *scale; it may be null, or alias logits. If rows have more columns
// than classes, the extra logits must be -inf and the extra gradients are meaningless.
struct CrossEntropy {
  Number number;
  std::int64_t rows, classes, columns;
  const void* logits;
  const std::int64_t* targets;
  std::int64_t ignore_index;
  double label_smoothing;
  float* losses;  // may be null
  void* gradient;
  const float* scale;  // on the device; null: 1
};
void cross_entropy(const CrossEntropy& entropy, Stream stream);
// out = in * *scale
void scale(const float* in, std::int64_t count, const float* scale, Number number, void* out, Stream stream);

// ---- nn::attention ----
// Packs the gradients of queries, keys and values, each [batch, heads, length, size] with its own strides
// (the last is 1), into one [batch, length, 3, heads, size]. The row of a head must be aligned to 16 bytes.
struct PackHeads {
  Number number;
  std::int64_t batch, heads, length, size;
  const void* from[3];
  std::int64_t strides[3][3];  // of batch, heads, length
  void* to;
};
void pack_heads(const PackHeads& pack, Stream stream);
// Factors of one Adam step; documented in optim/update/kernels.h.
struct AdamFactors {
  float first_weight, second_keep, second_weight, step_size, root_divisor, eps, shrink, l2;
};
// Options from which AdamFactors are computed, together with the step count.
struct AdamSettings {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled;  // AdamW
};
struct AdamTensor {
  void* parameter;  // set to the rounded master; ignored for float32, where the parameter is `master`
  const void* gradient;
  float *master, *exp_avg, *exp_avg_sq;
  float* max_exp_avg_sq;  // only with amsgrad
  std::int64_t* step;     // on the device; only with settings
  std::int64_t count;     // number of elements, at least 1
};
struct AdamCall {
  Number parameter, gradient;  // of all tensors; the gradient's type is the parameter's or float32
  bool amsgrad, maximize;
  AdamFactors factors;  // used if settings is null
  // Options and step counts in device memory, where a replayed graph sees changes to them. The kernel
  // increments the counts and computes the factors, one per tensor, in scratch.
  const AdamSettings* settings;
  AdamFactors* scratch;
};
void adam(const AdamCall& call, std::span<const AdamTensor> tensors, Stream stream);
void put_adam_settings(const AdamSettings& settings, AdamSettings* on_device, Stream stream);

}  // namespace lockstep::kernels

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

// There is a GPU, and they were compiled for every GPU that there is.
bool available();

// Columns are taken 8 at a time: their number must be a multiple of it, and rows must lie on 16 bytes.
constexpr std::int64_t kColumnStep = 8;

// sums[c] = sum over rows of values[., c], added up in float. scratch: as many floats as column_sum_scratch
// says.
std::size_t column_sum_scratch(std::int64_t rows, std::int64_t columns);
void column_sums(Number number, const void* values, std::int64_t rows, std::int64_t columns, void* sums,
                 float* scratch, Stream stream);

// ---- nn::LayerNorm ----
constexpr std::int64_t kMostNormColumns = 8192;
// sum = x + residual, out = (sum - mean) * rstd * weight + bias. Without a residual (null) sum may be null:
// it is x. weight and bias may be null, both. mean and rstd: a float for each row.
struct LayerNorm {
  Number number;
  std::int64_t rows, columns;
  const void *x, *residual, *weight, *bias;
  double eps;
  void *sum, *out;
  float *mean, *rstd;
};
void layer_norm(const LayerNorm& norm, Stream stream);

// dx = d(loss)/d(sum): through out, whose gradient is dout, and, where it is not null, dsum's. dweight and
// dbias may be null, both.
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
// dx, and its sums over rows as column_sums gives them: the gradient of the bias before it, where dbias is
// not null.
void gelu_gradient(Number number, const void* x, const void* dout, std::int64_t rows, std::int64_t columns,
                   void* dx, void* dbias, float* scratch, Stream stream);

// ---- nn::cross_entropy ----
// losses[r] = -log softmax(logits[r])[targets[r]]; 0 where the target is ignored; NaN where it is no class.
// gradient, if not null, may be logits itself: (softmax - wanted) * *scale. Where rows have more columns than
// there are classes, the rest of logits must be -inf; that of gradient is of no meaning.
struct CrossEntropy {
  Number number;
  std::int64_t rows, classes, columns;
  const void* logits;
  const std::int64_t* targets;
  std::int64_t ignore_index;
  double label_smoothing;
  float* losses;  // or null
  void* gradient;
  const float* scale;  // on the device; null: 1
};
void cross_entropy(const CrossEntropy& entropy, Stream stream);
// out = in * *scale
void scale(const float* in, std::int64_t count, const float* scale, Number number, void* out, Stream stream);

// ---- nn::attention ----
// Gradients of queries, keys and values, each [batch, heads, length, size] with strides of its own (the last
// is 1), to one [batch, length, 3, heads, size]. A head's row must lie on 16 bytes.
struct PackHeads {
  Number number;
  std::int64_t batch, heads, length, size;
  const void* from[3];
  std::int64_t strides[3][3];  // of batch, heads, length
  void* to;
};
void pack_heads(const PackHeads& pack, Stream stream);
// What one step of Adam multiplies with: optim/update/kernels.h says what each is.
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

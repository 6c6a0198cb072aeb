// The kernels of update.cpp, for CPUs with AVX2 and for any CPU: vector.h, compiled twice. As with the
// reduction kernels (see comm/reduce/kernels.h), their source files include only this header and define
// nothing with external linkage besides the tables.
#pragma once

#include <stddef.h>

namespace lockstep::detail {

// Factors of one step. LibTorch's operations take them as double and round each once to float, so we do the
// same.
struct AdamFactors {
  float first_weight;   // 1 - beta1
  float second_keep;    // beta2
  float second_weight;  // 1 - beta2
  float step_size;      // -(lr / (1 - beta1^step))
  float root_divisor;   // sqrt(1 - beta2^step)
  float eps;
  float shrink;   // factor on the parameter before the update: AdamW's decay; 1: none
  float l2;       // multiple of the parameter added to the gradient: Adam's decay; 0: none
  bool maximize;  // negate the gradient
};

struct SgdFactors {
  float step_size;  // -lr
  float momentum;
  float weight;  // 1 - dampening, weight of the gradient in the buffer
  float l2;      // as in AdamFactors
  bool maximize;
  bool nesterov;
};

// `count` elements from each pointer. The ranges must not overlap.
struct AdamPiece {
  float* parameter;
  const float* gradient;
  float* exp_avg;
  float* exp_avg_sq;
  float* max_exp_avg_sq;  // null without amsgrad
  size_t count;
};

struct SgdPiece {
  float* parameter;
  const float* gradient;
  float* momentum_buffer;  // null without momentum
  bool first;              // the buffer has no value yet
  size_t count;
};

// Adam in two parts; in between, the caller takes the square root of each of the `count` numbers in `roots`.
struct UpdateKernels {
  void (*adam_moments)(const AdamPiece&, const AdamFactors&, float* roots);
  void (*adam_step)(const AdamPiece&, const AdamFactors&, const float* roots);
  void (*square_roots)(float* values, size_t count);
  void (*sgd)(const SgdPiece&, const SgdFactors&);
};

extern const UpdateKernels kUpdatePortable;
#if defined(__x86_64__)
extern const UpdateKernels kUpdateAvx2;
#endif

}  // namespace lockstep::detail

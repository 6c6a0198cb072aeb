// The kernels of update.cpp, for CPUs with AVX2 and for any: vector.h, compiled twice. As for
// those of reductions (comm/reduce/kernels.h says why), their files include nothing but this and define
// nothing that others could take for their own.
#pragma once

#include <stddef.h>

namespace lockstep::detail {

// One step's numbers. LibTorch's operations take them as double and round them once to float: so do we.
struct AdamFactors {
  float first_weight;   // 1 - beta1
  float second_keep;    // beta2
  float second_weight;  // 1 - beta2
  float step_size;      // -(lr / (1 - beta1^step))
  float root_divisor;   // sqrt(1 - beta2^step)
  float eps;
  float shrink;   // parameters are multiplied by it first: AdamW's decay; 1 for none
  float l2;       // times the parameter is added to the gradient: Adam's decay; 0 for none
  bool maximize;  // the gradient counts with its sign changed
};

struct SgdFactors {
  float step_size;  // -lr
  float momentum;
  float weight;  // 1 - dampening, of the gradient in the buffer
  float l2;      // as above
  bool maximize;
  bool nesterov;
};

// `count` elements from each pointer. No two pointers reach over the same memory.
struct AdamPiece {
  float* parameter;
  const float* gradient;
  float* exp_avg;
  float* exp_avg_sq;
  float* max_exp_avg_sq;  // null: without amsgrad
  size_t count;
};

struct SgdPiece {
  float* parameter;
  const float* gradient;
  float* momentum_buffer;  // null: without momentum
  bool first;              // the buffer has no value yet
  size_t count;
};

// Adam in two parts, between which somebody takes the square roots of `roots`, count numbers.
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

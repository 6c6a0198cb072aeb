// The body of portable.cpp and avx2.cpp: plain loops that the compiler vectorises. Each operation rounds like
// LibTorch's kernels: twice, or once where they use a fused multiply-add. CMakeLists.txt disables any other
// contraction, so the bits do not depend on the vector width.
#pragma once

#include <lockstep/optim/update/kernels.h>

// Asserts that the pointers of a piece do not alias.
#if defined(__clang__)
#define LOCKSTEP_APART _Pragma("clang loop vectorize(assume_safety)")
#else
#define LOCKSTEP_APART _Pragma("GCC ivdep")
#endif

namespace lockstep::detail {
namespace {

inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

template <bool kL2>
inline float gradient_of(float gradient, bool maximize, float parameter, float l2) {
  const float g = maximize ? -gradient : gradient;
  if constexpr (kL2) return fused(parameter, l2, g);  // grad.add(param, alpha)
  return g;
}

// kFar: LibTorch's lerp starts from its far end if the weight is at least a half.
template <bool kL2, bool kFar, bool kMax>
void moments(const AdamPiece& piece, const AdamFactors& factors, float* roots) {
  const float* const parameter = piece.parameter;
  const float* const gradient = piece.gradient;
  float* const first = piece.exp_avg;
  float* const second = piece.exp_avg_sq;
  float* const most = piece.max_exp_avg_sq;
  const AdamFactors f = factors;
  const float far_weight = f.first_weight - 1;
  LOCKSTEP_APART
  for (size_t i = 0; i < piece.count; ++i) {
    const float g = gradient_of<kL2>(gradient[i], f.maximize, parameter[i], f.l2);
    const float m = first[i];
    first[i] = kFar ? fused(far_weight, g - m, g) : fused(f.first_weight, g - m, m);
    const float v = fused(f.second_weight * g, g, second[i] * f.second_keep);
    second[i] = v;
    if constexpr (kMax) {
      const float before = most[i];
      const float now = before != before || before > v ? before : v;  // keeps a NaN from either side
      most[i] = now;
      roots[i] = now;
    } else {
      roots[i] = v;
    }
  }
}

template <bool kL2, bool kFar>
void moments_maybe_max(const AdamPiece& piece, const AdamFactors& factors, float* roots) {
  if (piece.max_exp_avg_sq != nullptr)
    moments<kL2, kFar, true>(piece, factors, roots);
  else
    moments<kL2, kFar, false>(piece, factors, roots);
}

void adam_moments(const AdamPiece& piece, const AdamFactors& factors, float* roots) {
  const bool far = !(factors.first_weight < 0.5f);
  if (factors.l2 != 0)
    far ? moments_maybe_max<true, true>(piece, factors, roots)
        : moments_maybe_max<true, false>(piece, factors, roots);
  else
    far ? moments_maybe_max<false, true>(piece, factors, roots)
        : moments_maybe_max<false, false>(piece, factors, roots);
}

void adam_step(const AdamPiece& piece, const AdamFactors& factors, const float* roots) {
  float* const parameter = piece.parameter;
  const float* const first = piece.exp_avg;
  const AdamFactors f = factors;
  LOCKSTEP_APART
  for (size_t i = 0; i < piece.count; ++i) {
    const float divisor = roots[i] / f.root_divisor + f.eps;
    parameter[i] = parameter[i] * f.shrink + (f.step_size * first[i]) / divisor;
  }
}

void square_roots(float* values, size_t count) {
  LOCKSTEP_APART
  for (size_t i = 0; i < count; ++i) values[i] = __builtin_sqrtf(values[i]);
}

enum class Momentum { none, first, later };

template <bool kL2, Momentum kMomentum>
void sgd_pass(const SgdPiece& piece, const SgdFactors& factors) {
  float* const parameter = piece.parameter;
  const float* const gradient = piece.gradient;
  float* const buffer = piece.momentum_buffer;
  const SgdFactors f = factors;
  LOCKSTEP_APART
  for (size_t i = 0; i < piece.count; ++i) {
    float g = gradient_of<kL2>(gradient[i], f.maximize, parameter[i], f.l2);
    if constexpr (kMomentum != Momentum::none) {
      const float b = kMomentum == Momentum::first ? g : fused(g, f.weight, buffer[i] * f.momentum);
      buffer[i] = b;
      g = f.nesterov ? fused(b, f.momentum, g) : b;
    }
    parameter[i] = fused(g, f.step_size, parameter[i]);
  }
}

template <bool kL2>
void sgd_maybe_momentum(const SgdPiece& piece, const SgdFactors& factors) {
  if (piece.momentum_buffer == nullptr)
    sgd_pass<kL2, Momentum::none>(piece, factors);
  else if (piece.first)
    sgd_pass<kL2, Momentum::first>(piece, factors);
  else
    sgd_pass<kL2, Momentum::later>(piece, factors);
}

void sgd(const SgdPiece& piece, const SgdFactors& factors) {
  if (factors.l2 != 0)
    sgd_maybe_momentum<true>(piece, factors);
  else
    sgd_maybe_momentum<false>(piece, factors);
}

constexpr UpdateKernels kKernels = {adam_moments, adam_step, square_roots, sgd};

}  // namespace
}  // namespace lockstep::detail

// The updates of Adam, AdamW and SGD in one sweep over the parameters, without LibTorch: the bits that
// LibTorch's operations give one after another, for float32. tests/train compares them.
//
// Adam's square roots are the caller's to take: LibTorch's come from MKL where it has MKL, and are not those
// that the hardware rounds (one in five differs in the last bit).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include <lockstep/optim/update/kernels.h>

namespace lockstep::detail {

// What a step of Adam multiplies with, as Python works it out.
struct AdamScalars {
  double first_weight, second_keep, second_weight, step_size, root_divisor, eps, shrink, l2;
  bool maximize;
};

struct AdamSettings {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled;  // AdamW
  bool maximize;
};

AdamScalars adam_scalars(const AdamSettings& settings, std::int64_t step);  // steps count from 1
AdamFactors rounded(const AdamScalars& scalars);

struct AdamSlice {
  AdamPiece piece;
  AdamFactors factors;
};
struct SgdSlice {
  SgdPiece piece;
  SgdFactors factors;
};

// Slices count as one row of elements, of which `count` are updated, from number `first` on. So threads can
// share them out, and many small slices cost little more than one large one.
//
// scratch: as many numbers as are worked on at a time, one at least. take_roots() replaces each of them by
// its square root.
void adam_update(std::span<const AdamSlice> slices, std::size_t first, std::size_t count,
                 std::span<float> scratch, const std::function<void()>& take_roots);
void sgd_update(std::span<const SgdSlice> slices, std::size_t first, std::size_t count);

// As the hardware rounds them.
void take_square_roots(std::span<float> values);

}  // namespace lockstep::detail

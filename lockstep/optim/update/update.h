// The updates of Adam, AdamW and SGD in a single pass over the parameters, without LibTorch. For float32 they
// give the same bits as LibTorch's operations run one after another; tests/optim compares them.
//
// The caller takes Adam's square roots: LibTorch's come from MKL where available and differ from the
// hardware's rounding (in the last bit, for one in five).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include <lockstep/optim/update/kernels.h>

namespace lockstep::detail {

// Factors of one Adam step, computed as in Python.
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

// The slices are treated as one array of elements, of which `count` are updated starting at `first`. Threads
// can therefore divide the work evenly, and many small slices cost little more than one large slice.
//
// scratch: determines how many elements are processed at a time, at least one. take_roots() must replace each
// of its elements by its square root.
void adam_update(std::span<const AdamSlice> slices, std::size_t first, std::size_t count,
                 std::span<float> scratch, const std::function<void()>& take_roots);
void sgd_update(std::span<const SgdSlice> slices, std::size_t first, std::size_t count);

// Square roots rounded by the hardware.
void take_square_roots(std::span<float> values);

}  // namespace lockstep::detail

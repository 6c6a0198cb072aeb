#include <lockstep/optim/update/update.h>

#include <algorithm>
#include <cmath>

#include <lockstep/base/error.h>
#include <lockstep/comm/reduce/level.h>

namespace lockstep::detail {
namespace {

const UpdateKernels& kernels() {
#if defined(__x86_64__)
  static const bool fma = __builtin_cpu_supports("fma");
  if (fma && simd_level() != SimdLevel::portable) return kUpdateAvx2;
#endif
  return kUpdatePortable;
}

AdamPiece part_of(const AdamPiece& piece, std::size_t from, std::size_t count) {
  auto* const most = piece.max_exp_avg_sq;
  return {piece.parameter + from,  piece.gradient + from,        piece.exp_avg + from,
          piece.exp_avg_sq + from, most ? most + from : nullptr, count};
}

SgdPiece part_of(const SgdPiece& piece, std::size_t from, std::size_t count) {
  auto* const buffer = piece.momentum_buffer;
  return {piece.parameter + from, piece.gradient + from, buffer ? buffer + from : nullptr, piece.first,
          count};
}

// A position in the concatenated elements of all slices.
template <typename Slice>
class Place {
 public:
  Place(std::span<const Slice> slices, std::size_t element) : slices_(slices), element_(element) {
    while (slice_ < slices_.size() && element_ >= slices_[slice_].piece.count)
      element_ -= slices_[slice_++].piece.count;
  }

  // Calls visit(piece, factors, number of elements before it) for the next `count` elements.
  template <typename Visit>
  void advance(std::size_t count, Visit visit) {
    for (std::size_t done = 0; done < count;) {
      LOCKSTEP_ASSERT(slice_ < slices_.size(), "position beyond the last slice");
      const Slice& slice = slices_[slice_];
      const std::size_t part = std::min(slice.piece.count - element_, count - done);
      if (part > 0) visit(part_of(slice.piece, element_, part), slice.factors, done);
      done += part;
      element_ += part;
      if (element_ == slice.piece.count) {
        element_ = 0;
        ++slice_;
      }
    }
  }

 private:
  std::span<const Slice> slices_;
  std::size_t slice_ = 0;
  std::size_t element_;
};

}  // namespace

AdamScalars adam_scalars(const AdamSettings& s, std::int64_t step) {
  const auto steps = static_cast<double>(step);
  const double correction1 = 1 - std::pow(s.beta1, steps);
  const double correction2 = 1 - std::pow(s.beta2, steps);
  return {.first_weight = 1 - s.beta1,
          .second_keep = s.beta2,
          .second_weight = 1 - s.beta2,
          .step_size = -(s.lr / correction1),
          .root_divisor = std::pow(correction2, 0.5),  // as Python's **0.5, not sqrt
          .eps = s.eps,
          .shrink = s.decoupled && s.weight_decay != 0 ? 1 - s.lr * s.weight_decay : 1,
          .l2 = s.decoupled ? 0 : s.weight_decay,
          .maximize = s.maximize};
}

AdamFactors rounded(const AdamScalars& s) {
  return {.first_weight = static_cast<float>(s.first_weight),
          .second_keep = static_cast<float>(s.second_keep),
          .second_weight = static_cast<float>(s.second_weight),
          .step_size = static_cast<float>(s.step_size),
          .root_divisor = static_cast<float>(s.root_divisor),
          .eps = static_cast<float>(s.eps),
          .shrink = static_cast<float>(s.shrink),
          .l2 = static_cast<float>(s.l2),
          .maximize = s.maximize};
}

void adam_update(std::span<const AdamSlice> slices, std::size_t first, std::size_t count,
                 std::span<float> scratch, const std::function<void()>& take_roots) {
  LOCKSTEP_ASSERT(!scratch.empty(), "scratch is empty");
  const UpdateKernels& kernel = kernels();
  Place<AdamSlice> place(slices, first);
  while (count > 0) {
    const std::size_t now = std::min(count, scratch.size());
    auto again = place;
    place.advance(now, [&](const AdamPiece& piece, const AdamFactors& factors, std::size_t before) {
      kernel.adam_moments(piece, factors, scratch.data() + before);
    });
    take_roots();
    again.advance(now, [&](const AdamPiece& piece, const AdamFactors& factors, std::size_t before) {
      kernel.adam_step(piece, factors, scratch.data() + before);
    });
    count -= now;
  }
}

void sgd_update(std::span<const SgdSlice> slices, std::size_t first, std::size_t count) {
  const UpdateKernels& kernel = kernels();
  Place<SgdSlice> place(slices, first);
  place.advance(count, [&](const SgdPiece& piece, const SgdFactors& factors, std::size_t) {
    kernel.sgd(piece, factors);
  });
}

void take_square_roots(std::span<float> values) { kernels().square_roots(values.data(), values.size()); }

}  // namespace lockstep::detail

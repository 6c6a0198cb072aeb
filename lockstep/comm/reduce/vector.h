// The body of reduce/portable.cpp, avx2.cpp and avx512.cpp, which set the vector width and the number of
// results that are computed before they are stored. reduce/kernels.h explains why everything is in an unnamed
// namespace.
#pragma once

#include <lockstep/comm/reduce/kernels.h>
#include <lockstep/comm/reduce/numbers.h>

#if defined(__clang__)
#define LOCKSTEP_UNROLLED _Pragma("unroll")
#else
#define LOCKSTEP_UNROLLED _Pragma("GCC unroll 8")
#endif

namespace lockstep::detail {
namespace {

constexpr size_t kUnroll = LOCKSTEP_UNROLL;

// The left subtree of p > 1 inputs has the largest power of two below p.
constexpr size_t left_of(size_t p) {
  size_t left = 1;
  while (2 * left < p) left *= 2;
  return left;
}

template <typename Format, typename Op, size_t kInputs>
LOCKSTEP_INLINE typename Format::Wide tree(const char* const* inputs, size_t at) {
  if constexpr (kInputs == 1) {
    return Format::widen(inputs[0] + at);
  } else {
    constexpr size_t kLeft = left_of(kInputs);
    return Format::template fold<Op>(tree<Format, Op, kLeft>(inputs, at),
                                     tree<Format, Op, kInputs - kLeft>(inputs + kLeft, at));
  }
}

// For any number of inputs: subtrees of kGroup inputs wait for their right neighbour, like the digits of a
// binary counter. subtree(first, n) folds inputs first to first + n; n is below kGroup only at the end.
template <typename Format, typename Op, size_t kGroup, typename Subtree>
LOCKSTEP_INLINE typename Format::Wide counted_tree(size_t inputs, Subtree subtree) {
  typename Format::Wide waiting[32];
  size_t depth = 0;
  for (size_t first = 0, group = 0;; first += kGroup, ++group) {
    const bool last = inputs - first <= kGroup;
    auto value = subtree(first, last ? inputs - first : kGroup);
    if (last) {
      while (depth > 0) value = Format::template fold<Op>(waiting[--depth], value);
      return value;
    }
    for (size_t digits = group; digits & 1; digits >>= 1)
      value = Format::template fold<Op>(waiting[--depth], value);
    waiting[depth++] = value;
  }
}

template <typename Format, typename Op>
LOCKSTEP_INLINE typename Format::Wide any_tree(const char* const* inputs, size_t count, size_t at) {
  return counted_tree<Format, Op, 4>(count, [&](size_t first, size_t n) {
    switch (n) {
      case 1: return tree<Format, Op, 1>(inputs + first, at);
      case 2: return tree<Format, Op, 2>(inputs + first, at);
      case 3: return tree<Format, Op, 3>(inputs + first, at);
      default: return tree<Format, Op, 4>(inputs + first, at);
    }
  });
}

// Handles the rest, less than a vector: the same arithmetic on a padded copy. kAverage: the job may be an
// average. If it cannot be, no division is compiled: clang would divide by one, which changes signalling
// NaNs.
template <bool kAverage, typename Format, typename Op>
__attribute__((noinline)) void finish(const FoldJob& job, size_t at) {
  const size_t left = job.bytes - at;
  const auto inputs = reinterpret_cast<const char* const*>(job.inputs);
  auto sum = counted_tree<Format, Op, 1>(job.input_count, [&](size_t r, size_t) {
    char padded[kVector] = {};
    __builtin_memcpy(padded, inputs[r] + at, left);
    return Format::widen(padded);
  });
  if constexpr (kAverage)
    if (job.divisor != 0) sum = Format::divided(sum, static_cast<typename Format::Divisor>(job.divisor));
  char result[kVector];
  store(result, Format::narrow(sum));
  for (size_t q = 0; q < job.output_count; ++q)
    __builtin_memcpy(static_cast<char*>(job.outputs[q]) + at, result, left);
}

// sum_at(at) is the fold of the vectors that begin at that byte. Results stay in registers until all inputs
// are read, so an output may be an input.
template <bool kAverage, size_t kUnits, typename Format, typename SumAt>
LOCKSTEP_INLINE size_t run_units(const FoldJob& job, size_t at, SumAt sum_at) {
  const size_t bytes = job.bytes, outputs = job.output_count;
  [[maybe_unused]] const auto divisor = static_cast<typename Format::Divisor>(job.divisor);
  [[maybe_unused]] const bool averaged = job.divisor != 0;
  const auto output = reinterpret_cast<char* const*>(job.outputs);
  for (; bytes - at >= kUnits * kVector; at += kUnits * kVector) {
    typename Format::Wide sums[kUnits];
    LOCKSTEP_UNROLLED
    for (size_t u = 0; u < kUnits; ++u) sums[u] = sum_at(at + u * kVector);
    if constexpr (kAverage)
      if (averaged) {
        LOCKSTEP_UNROLLED
        for (size_t u = 0; u < kUnits; ++u) sums[u] = Format::divided(sums[u], divisor);
      }
    decltype(Format::narrow(sums[0])) results[kUnits];
    LOCKSTEP_UNROLLED
    for (size_t u = 0; u < kUnits; ++u) results[u] = Format::narrow(sums[u]);
    for (size_t q = 0; q < outputs; ++q) {
      char* to = output[q] + at;
      LOCKSTEP_UNROLLED
      for (size_t u = 0; u < kUnits; ++u) store(to + u * kVector, results[u]);
    }
  }
  return at;
}

template <bool kAverage, size_t kUnits, typename Format, typename Op, typename SumAt>
LOCKSTEP_INLINE void run(const FoldJob& job, SumAt sum_at) {
  size_t at = 0;
  if constexpr (kUnits > 1) at = run_units<kAverage, kUnits, Format>(job, at, sum_at);
  at = run_units<kAverage, 1, Format>(job, at, sum_at);
  if (at < job.bytes) finish<kAverage, Format, Op>(job, at);
}

template <typename Format, typename Op, size_t kInputs>
void run_few(const FoldJob& job) {
  const char* inputs[kInputs];  // a copy, which stores through the outputs cannot alias
  for (size_t r = 0; r < kInputs; ++r) inputs[r] = static_cast<const char*>(job.inputs[r]);
  auto sum_at = [&](size_t at) __attribute__((always_inline)) {
    return tree<Format, Op, kInputs>(inputs, at);
  };
  run<(kInputs > 1), kUnroll, Format, Op>(job, sum_at);
}

template <bool kAverage, typename Format, typename Op>
void run_any(const FoldJob& job) {
  auto sum_at = [&](size_t at) __attribute__((always_inline)) {
    return any_tree<Format, Op>(reinterpret_cast<const char* const*>(job.inputs), job.input_count, at);
  };
  run<kAverage, 1, Format, Op>(job, sum_at);
}

// Training mostly needs sums: the common numbers of ranks are compile-time constants.
template <typename Format, typename Op>
void run_sum(const FoldJob& job) {
  switch (job.input_count) {
    case 1: return run_few<Format, Op, 1>(job);
    case 2: return run_few<Format, Op, 2>(job);
    case 3: return run_few<Format, Op, 3>(job);
    case 4: return run_few<Format, Op, 4>(job);
    case 5: return run_few<Format, Op, 5>(job);
    case 6: return run_few<Format, Op, 6>(job);
    case 7: return run_few<Format, Op, 7>(job);
    case 8: return run_few<Format, Op, 8>(job);
    case 16: return run_few<Format, Op, 16>(job);
    default: return run_any<true, Format, Op>(job);
  }
}

template <typename Format, bool kNan>
bool fold_floats(Fold fold, const FoldJob& job) {
  switch (fold) {
    case Fold::sum: return run_sum<Format, FloatSum<kNan>>(job), true;
    case Fold::product: return run_any<false, Format, FloatProduct<kNan>>(job), true;
    case Fold::min: return run_any<false, Format, FloatMin>(job), true;
    case Fold::max: return run_any<false, Format, FloatMax>(job), true;
    default: return false;
  }
}

// Integer folds give the same result in any order.
template <typename T, typename Op>
bool run_integers(const FoldJob& job) {
  const auto inputs = reinterpret_cast<const char* const*>(job.inputs);
  auto sum_at = [&](size_t at) __attribute__((always_inline)) {
    auto sum = load<T>(inputs[0] + at);
    for (size_t r = 1; r < job.input_count; ++r) sum = Op::of(sum, load<T>(inputs[r] + at));
    return sum;
  };
  run<false, kUnroll, Plain<T>, Op>(job, sum_at);
  return true;
}

template <typename T, typename Unsigned>
bool fold_integers(Fold fold, const FoldJob& job) {
  switch (fold) {
    case Fold::sum: return run_integers<Unsigned, Sum>(job);
    case Fold::product: return run_integers<Unsigned, Product>(job);
    case Fold::min: return run_integers<T, Min>(job);
    case Fold::max: return run_integers<T, Max>(job);
    case Fold::bit_and: return run_integers<uint64_t, And>(job);
    case Fold::bit_or: return run_integers<uint64_t, Or>(job);
    case Fold::bit_xor: return run_integers<uint64_t, Xor>(job);
  }
  return false;
}

bool fold_any(Number number, Fold fold, const FoldJob& job) {
  switch (number) {
    case Number::f32: return fold_floats<Plain<float>, true>(fold, job);
    case Number::f64: return fold_floats<Plain<double>, true>(fold, job);
    case Number::bf16: return fold_floats<Bfloat16, false>(fold, job);
    case Number::f16: return fold_floats<Half, true>(fold, job);
    case Number::i8: return fold_integers<int8_t, uint8_t>(fold, job);
    case Number::i16: return fold_integers<int16_t, uint16_t>(fold, job);
    case Number::i32: return fold_integers<int32_t, uint32_t>(fold, job);
    case Number::i64: return fold_integers<int64_t, uint64_t>(fold, job);
    case Number::u8: return fold_integers<uint8_t, uint8_t>(fold, job);
  }
  return false;
}

constexpr size_t kLanes = kVector / sizeof(float);

template <typename Format>
bool widen_all(const char* from, char* to, size_t count) {
  for (; count >= kLanes; count -= kLanes, from += kVector / 2, to += kVector)
    store(to, Format::single(from));
  if (count == 0) return true;
  char padded[kVector / 2] = {}, wide[kVector];
  __builtin_memcpy(padded, from, count * 2);
  store(wide, Format::single(padded));
  __builtin_memcpy(to, wide, count * 4);
  return true;
}

template <typename Format>
bool narrow_all(const char* from, char* to, size_t count) {
  for (; count >= kLanes; count -= kLanes, from += kVector, to += kVector / 2)
    Format::put_single(to, load<float>(from));
  if (count == 0) return true;
  char padded[kVector] = {}, narrow[kVector / 2];
  __builtin_memcpy(padded, from, count * 4);
  Format::put_single(narrow, load<float>(padded));
  __builtin_memcpy(to, narrow, count * 2);
  return true;
}

template <typename Format>
bool convert_as(const ConvertJob& job) {
  const char* from = static_cast<const char*>(job.from);
  char* to = static_cast<char*>(job.to);
  return job.widens ? widen_all<Format>(from, to, job.count) : narrow_all<Format>(from, to, job.count);
}

bool convert_any(Number number, const ConvertJob& job) {
  if (number == Number::bf16) return convert_as<Bfloat16>(job);
  if (number == Number::f16) return convert_as<Half>(job);
  return false;
}

}  // namespace
}  // namespace lockstep::detail

// The body of reduce_portable.cpp, reduce_avx2.cpp and reduce_avx512.cpp, which say how wide a vector is.
// reduce_kernels.h says why all of it is in an unnamed namespace. Vectors are those of GCC and clang, so
// that one text serves every width; half alone has instructions of its own where there are some.
//
// All widths give the same bits. Sums and products are not contracted (-ffp-contract=off), and where both
// sides are NaN the left one stays: hardware takes the first operand's, compilers swap operands.
#pragma once

#include <stdint.h>

#include <lockstep/comm/reduce_kernels.h>

#if LOCKSTEP_VECTOR_BYTES > 16
#include <immintrin.h>
#endif

#define LOCKSTEP_INLINE inline __attribute__((always_inline))

namespace lockstep::detail {
namespace {

constexpr size_t kVector = LOCKSTEP_VECTOR_BYTES;
constexpr size_t kUnroll = LOCKSTEP_UNROLL;

template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(LOCKSTEP_VECTOR_BYTES)));
};
template <typename T>
using Vector = typename VectorOf<T>::type;
using Floats = Vector<float>;
using Words = Vector<uint32_t>;
using SignedWords = Vector<int32_t>;

// memcpy, because nothing is aligned and anything may alias.
template <typename T>
LOCKSTEP_INLINE Vector<T> load(const char* from) {
  Vector<T> v;
  __builtin_memcpy(&v, from, kVector);
  return v;
}

// The one place that writes results.
template <typename V>
LOCKSTEP_INLINE void store(char* to, V v) {
  __builtin_memcpy(to, &v, kVector);
}

LOCKSTEP_INLINE Words bits(Floats v) { return reinterpret_cast<Words>(v); }
LOCKSTEP_INLINE Floats from_bits(Words v) { return reinterpret_cast<Floats>(v); }
LOCKSTEP_INLINE Words all(uint32_t word) { return Words{} + word; }

// --- Folds. ----------------------------------------------------------------------------------------------

// kNan: whose NaN it is can be seen in the result.
template <bool kNan>
struct FloatSum {
  template <typename V>
  static LOCKSTEP_INLINE V of(V a, V b) {
    if constexpr (kNan)
      return a + (a != a ? a : b);
    else
      return a + b;
  }
};
template <bool kNan>
struct FloatProduct {
  template <typename V>
  static LOCKSTEP_INLINE V of(V a, V b) {
    if constexpr (kNan)
      return a * (a != a ? a : b);
    else
      return a * b;
  }
};
// As at::minimum and at::maximum: a NaN on either side wins; of equals, the left one.
struct FloatMin {
  template <typename V>
  static LOCKSTEP_INLINE V of(V a, V b) {
    return (a <= b) | (a != a) ? a : b;
  }
};
struct FloatMax {
  template <typename V>
  static LOCKSTEP_INLINE V of(V a, V b) {
    return (a >= b) | (a != a) ? a : b;
  }
};

// Signed integers wrap around, as LibTorch's do: these get them as unsigned.
struct Sum {
  template <typename V>
  static LOCKSTEP_INLINE V of(V a, V b) {
    return a + b;
  }
};
struct Product {
  template <typename V>
  static LOCKSTEP_INLINE V of(V a, V b) {
    return a * b;
  }
};
struct Min {
  template <typename V>
  static LOCKSTEP_INLINE V of(V a, V b) {
    return a < b ? a : b;
  }
};
struct Max {
  template <typename V>
  static LOCKSTEP_INLINE V of(V a, V b) {
    return a > b ? a : b;
  }
};
struct And {
  template <typename V>
  static LOCKSTEP_INLINE V of(V a, V b) {
    return a & b;
  }
};
struct Or {
  template <typename V>
  static LOCKSTEP_INLINE V of(V a, V b) {
    return a | b;
  }
};
struct Xor {
  template <typename V>
  static LOCKSTEP_INLINE V of(V a, V b) {
    return a ^ b;
  }
};

// --- Formats: how kVector bytes become numbers to fold, and the other way. --------------------------------

template <typename T>
struct Plain {
  using Wide = Vector<T>;
  using Divisor = T;
  static LOCKSTEP_INLINE Wide widen(const char* from) { return load<T>(from); }
  static LOCKSTEP_INLINE Vector<T> narrow(Wide v) { return v; }
  template <typename Op>
  static LOCKSTEP_INLINE Wide fold(Wide a, Wide b) {
    return Op::of(a, b);
  }
  static LOCKSTEP_INLINE Wide divided(Wide v, T divisor) {
    if constexpr (T(0.5) != 0)
      return v / divisor;
    else
      return v;  // integers have no average
  }
};

// The numbers of kVector bytes of bfloat16 or half as two vectors of float; which is where does not matter
// as long as narrow() puts it back.
struct Pair {
  Floats first, second;
};

struct Paired {
  using Wide = Pair;
  using Divisor = float;
  template <typename Op>
  static LOCKSTEP_INLINE Pair fold(Pair a, Pair b) {
    return {Op::of(a.first, b.first), Op::of(a.second, b.second)};
  }
  static LOCKSTEP_INLINE Pair divided(Pair v, float divisor) {
    return {v.first / divisor, v.second / divisor};
  }
};

struct Bfloat16 : Paired {
  // A word holds two numbers, and each is the upper half of a float.
  static LOCKSTEP_INLINE Pair widen(const char* from) {
    const Words w = load<uint32_t>(from);
    return {from_bits(w << 16), from_bits(w & 0xffff0000u)};
  }
  static LOCKSTEP_INLINE Words narrow(Pair v) {
    return (rounded(v.first) >> 16) | (rounded(v.second) & 0xffff0000u);
  }

 private:
  // To the nearest, of two the even one, in the upper half. Every NaN becomes 7fc0, as c10::BFloat16 has it.
  static LOCKSTEP_INLINE Words rounded(Floats v) {
    const Words w = bits(v), up = w + 0x7fffu + ((w >> 16) & 1u);
    return v != v ? all(0x7fc00000u) : up;
  }
};

#if LOCKSTEP_VECTOR_BYTES > 16
struct Half : Paired {
#if LOCKSTEP_VECTOR_BYTES == 64
  static constexpr __mmask16 kAll = 0xffff;  // with no mask GCC 12 warns of a value that is not used
#endif
  static LOCKSTEP_INLINE Pair widen(const char* from) {
    return {widen_half(from), widen_half(from + kVector / 2)};
  }

  static LOCKSTEP_INLINE Words narrow(Pair v) {
    constexpr int kNearestEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const Floats first = quiet(v.first), second = quiet(v.second);
#if LOCKSTEP_VECTOR_BYTES == 64
    const __m256i low = _mm512_maskz_cvtps_ph(kAll, first, kNearestEven);
    const __m256i high = _mm512_maskz_cvtps_ph(kAll, second, kNearestEven);
    return reinterpret_cast<Words>(_mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(low), high, 1));
#else
    const __m128i low = _mm256_cvtps_ph(first, kNearestEven), high = _mm256_cvtps_ph(second, kNearestEven);
    return reinterpret_cast<Words>(_mm256_set_m128i(high, low));
#endif
  }

 private:
  static LOCKSTEP_INLINE Floats widen_half(const char* from) {
#if LOCKSTEP_VECTOR_BYTES == 64
    return _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
  }
  // Every NaN becomes 7e00 with its sign, as c10::Half has it where the instruction is not used.
  static LOCKSTEP_INLINE Floats quiet(Floats v) {
    return from_bits(v != v ? (bits(v) & 0x80000000u) | 0x7fc00000u : bits(v));
  }
};
#else
// The arithmetic of c10::Half (torch/headeronly/util/Half.h, where it is explained), on vectors.
struct Half : Paired {
  static LOCKSTEP_INLINE Pair widen(const char* from) {
    const Words w = load<uint32_t>(from);
    return {widened(w << 16), widened(w & 0xffff0000u)};
  }
  static LOCKSTEP_INLINE Words narrow(Pair v) { return rounded(v.first) | (rounded(v.second) << 16); }

 private:
  static LOCKSTEP_INLINE Floats widened(Words w) {  // of a number in the upper half
    const Words magnitude = w & 0x7fffffffu;
    const Floats normal = from_bits((magnitude >> 3) + (0xe0u << 23)) * 0x1p-112f;
    const Floats denormal = from_bits((magnitude >> 16) | (126u << 23)) - 0.5f;
    const auto small = reinterpret_cast<SignedWords>(magnitude) < (1 << 26);
    return from_bits((w & 0x80000000u) | (small ? bits(denormal) : bits(normal)));
  }
  static LOCKSTEP_INLINE Words rounded(Floats v) {  // in the lower half
    const Words w = bits(v), exponent = w & 0x7f800000u, least = all(0x38800000u);
    const Floats scaled = (from_bits(w & 0x7fffffffu) * 0x1p+112f) * 0x1p-110f;
    const auto tiny = reinterpret_cast<SignedWords>(exponent) < 0x38800000;
    const Words sum = bits(from_bits((tiny ? least : exponent) + 0x07800000u) + scaled);
    const Words magnitude = ((sum >> 13) & 0x7c00u) + (sum & 0x0fffu);
    return ((w & 0x80000000u) >> 16) | (v != v ? all(0x7e00u) : magnitude);
  }
};
#endif

// --- Trees. ----------------------------------------------------------------------------------------------

// The left subtree of p > 1 inputs has the largest power of two below p of them.
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

// Any number of inputs: subtrees of kGroup inputs wait for the one on their right as the digits of a binary
// counter do. subtree(first, n) is that of inputs first to first + n, and n is less at the end alone.
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

// Less than a vector is left: the same arithmetic on a padded copy.
template <typename Format, typename Op>
__attribute__((noinline)) void finish(const FoldJob& job, size_t at) {
  const size_t left = job.bytes - at;
  const auto inputs = reinterpret_cast<const char* const*>(job.inputs);
  auto sum = counted_tree<Format, Op, 1>(job.input_count, [&](size_t r, size_t) {
    char padded[kVector] = {};
    __builtin_memcpy(padded, inputs[r] + at, left);
    return Format::widen(padded);
  });
  if (job.averaged) sum = Format::divided(sum, static_cast<typename Format::Divisor>(job.input_count));
  char result[kVector];
  store(result, Format::narrow(sum));
  for (size_t q = 0; q < job.output_count; ++q)
    __builtin_memcpy(static_cast<char*>(job.outputs[q]) + at, result, left);
}

// sum_at(at) is the fold of the vectors that begin at that byte. Results are kept in registers until all
// inputs are read, so that an output may be an input.
template <size_t kUnits, typename Format, typename SumAt>
LOCKSTEP_INLINE size_t run_units(const FoldJob& job, typename Format::Divisor divisor, size_t at,
                                 SumAt sum_at) {
  const size_t bytes = job.bytes, outputs = job.output_count;
  const bool averaged = job.averaged;
  const auto output = reinterpret_cast<char* const*>(job.outputs);
  for (; bytes - at >= kUnits * kVector; at += kUnits * kVector) {
    typename Format::Wide sums[kUnits];
#pragma GCC unroll 8
    for (size_t u = 0; u < kUnits; ++u) sums[u] = sum_at(at + u * kVector);
    if (averaged) {
#pragma GCC unroll 8
      for (size_t u = 0; u < kUnits; ++u) sums[u] = Format::divided(sums[u], divisor);
    }
    decltype(Format::narrow(sums[0])) results[kUnits];
#pragma GCC unroll 8
    for (size_t u = 0; u < kUnits; ++u) results[u] = Format::narrow(sums[u]);
    for (size_t q = 0; q < outputs; ++q) {
      char* to = output[q] + at;
#pragma GCC unroll 8
      for (size_t u = 0; u < kUnits; ++u) store(to + u * kVector, results[u]);
    }
  }
  return at;
}

template <size_t kUnits, typename Format, typename Op, typename SumAt>
LOCKSTEP_INLINE void run(const FoldJob& job, SumAt sum_at) {
  const auto divisor = static_cast<typename Format::Divisor>(job.input_count);
  size_t at = 0;
  if constexpr (kUnits > 1) at = run_units<kUnits, Format>(job, divisor, at, sum_at);
  at = run_units<1, Format>(job, divisor, at, sum_at);
  if (at < job.bytes) finish<Format, Op>(job, at);
}

template <typename Format, typename Op, size_t kInputs>
void run_few(const FoldJob& job) {
  const char* inputs[kInputs];  // a copy: what is stored through the outputs cannot change it
  for (size_t r = 0; r < kInputs; ++r) inputs[r] = static_cast<const char*>(job.inputs[r]);
  run<kUnroll, Format, Op>(
      job, [&](size_t at) __attribute__((always_inline)) { return tree<Format, Op, kInputs>(inputs, at); });
}

template <typename Format, typename Op>
void run_any(const FoldJob& job) {
  run<1, Format, Op>(
      job, [&](size_t at) __attribute__((always_inline)) {
        return any_tree<Format, Op>(reinterpret_cast<const char* const*>(job.inputs), job.input_count, at);
      });
}

// Sums are what training asks for: the usual numbers of ranks are constants.
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
    default: return run_any<Format, Op>(job);
  }
}

template <typename Format, bool kNan>
bool fold_floats(Fold fold, const FoldJob& job) {
  switch (fold) {
    case Fold::sum: return run_sum<Format, FloatSum<kNan>>(job), true;
    case Fold::product: return run_any<Format, FloatProduct<kNan>>(job), true;
    case Fold::min: return run_any<Format, FloatMin>(job), true;
    case Fold::max: return run_any<Format, FloatMax>(job), true;
    default: return false;
  }
}

// Integers come to the same in any order.
template <typename T, typename Op>
bool run_integers(const FoldJob& job) {
  const auto inputs = reinterpret_cast<const char* const*>(job.inputs);
  run<kUnroll, Plain<T>, Op>(
      job, [&](size_t at) __attribute__((always_inline)) {
        auto sum = load<T>(inputs[0] + at);
        for (size_t r = 1; r < job.input_count; ++r) sum = Op::of(sum, load<T>(inputs[r] + at));
        return sum;
      });
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

}  // namespace
}  // namespace lockstep::detail

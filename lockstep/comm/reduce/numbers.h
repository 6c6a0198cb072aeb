// Vectors of numbers for reduce/vector.h: loads, folds and stores. LOCKSTEP_VECTOR_BYTES sets the width. They
// are GCC's and clang's vector types, so one source serves every width. Only Half uses intrinsics, where
// available.
//
// All widths give the same bits. Sums and products are not contracted (-ffp-contract=off), and if both
// operands are NaN the left one is kept: hardware returns the first operand's, and compilers swap operands.
#pragma once

#include <stdint.h>

#include <lockstep/comm/reduce/kernels.h>

#if LOCKSTEP_VECTOR_BYTES > 16
#include <immintrin.h>
#endif

#define LOCKSTEP_INLINE inline __attribute__((always_inline))

namespace lockstep::detail {
namespace {

constexpr size_t kVector = LOCKSTEP_VECTOR_BYTES;

template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(LOCKSTEP_VECTOR_BYTES)));
};
template <typename T>
using Vector = typename VectorOf<T>::type;
using Floats = Vector<float>;
using Words = Vector<uint32_t>;
using SignedWords = Vector<int32_t>;

// memcpy, because the data may be unaligned and may alias.
template <typename T>
LOCKSTEP_INLINE Vector<T> load(const char* from) {
  Vector<T> v;
  __builtin_memcpy(&v, from, kVector);
  return v;
}

// The only function that writes results.
template <typename V>
LOCKSTEP_INLINE void store(char* to, V v) {
  __builtin_memcpy(to, &v, kVector);
}

// A vector of two-byte numbers, with as many elements as a vector of floats.
typedef uint16_t Shorts __attribute__((vector_size(LOCKSTEP_VECTOR_BYTES / 2)));
LOCKSTEP_INLINE Words load_shorts(const char* from) {
  Shorts v;
  __builtin_memcpy(&v, from, sizeof v);
  return __builtin_convertvector(v, Words);
}
LOCKSTEP_INLINE void store_shorts(char* to, Words words) {
  const Shorts v = __builtin_convertvector(words, Shorts);
  __builtin_memcpy(to, &v, sizeof v);
}

LOCKSTEP_INLINE Words bits(Floats v) { return reinterpret_cast<Words>(v); }
LOCKSTEP_INLINE Floats from_bits(Words v) { return reinterpret_cast<Floats>(v); }
LOCKSTEP_INLINE Words all(uint32_t word) { return Words{} + word; }

// --- Folds. ----------------------------------------------------------------------------------------------

// kNan: the result must keep the payload of the left NaN.
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
// Like at::minimum and at::maximum: a NaN on either side wins; of equal values, the left one.
struct FloatMin {
  template <typename V>
  static LOCKSTEP_INLINE V of(V a, V b) {
    return ((a <= b) | (a != a)) ? a : b;
  }
};
struct FloatMax {
  template <typename V>
  static LOCKSTEP_INLINE V of(V a, V b) {
    return ((a >= b) | (a != a)) ? a : b;
  }
};

// Signed integers wrap around, as in LibTorch: they are passed as unsigned.
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

// --- Formats: conversion between kVector bytes and the numbers to fold. ----------------------------------

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
  static LOCKSTEP_INLINE Wide divided(Wide v, T divisor) { return v / divisor; }
};

// The numbers of kVector bytes of bfloat16 or half, as two vectors of float. Their order is irrelevant as
// long as narrow() restores it.
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
  // A word holds two numbers, each the upper half of a float.
  static LOCKSTEP_INLINE Pair widen(const char* from) {
    const Words w = load<uint32_t>(from);
    return {from_bits(w << 16), from_bits(w & 0xffff0000u)};
  }
  static LOCKSTEP_INLINE Words narrow(Pair v) {
    return (rounded(v.first) >> 16) | (rounded(v.second) & 0xffff0000u);
  }
  // In order, without a fold in between: converts half a vector to a vector of float, and back.
  static LOCKSTEP_INLINE Floats single(const char* from) { return from_bits(load_shorts(from) << 16); }
  static LOCKSTEP_INLINE void put_single(char* to, Floats v) { store_shorts(to, rounded(v) >> 16); }

 private:
  // Rounds to nearest even, into the upper half. Every NaN becomes 7fc0, as in c10::BFloat16.
  static LOCKSTEP_INLINE Words rounded(Floats v) {
    const Words w = bits(v), up = w + 0x7fffu + ((w >> 16) & 1u);
    return v != v ? all(0x7fc00000u) : up;
  }
};

#if LOCKSTEP_VECTOR_BYTES > 16
struct Half : Paired {
#if LOCKSTEP_VECTOR_BYTES == 64
  static constexpr __mmask16 kAll = 0xffff;  // without a mask GCC 12 warns about an unused value
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
  static LOCKSTEP_INLINE Floats single(const char* from) { return widen_half(from); }
  static LOCKSTEP_INLINE void put_single(char* to, Floats v) {
    constexpr int kNearestEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
#if LOCKSTEP_VECTOR_BYTES == 64
    const __m256i narrow = _mm512_maskz_cvtps_ph(kAll, quiet(v), kNearestEven);
#else
    const __m128i narrow = _mm256_cvtps_ph(quiet(v), kNearestEven);
#endif
    __builtin_memcpy(to, &narrow, sizeof narrow);
  }

 private:
  static LOCKSTEP_INLINE Floats widen_half(const char* from) {
#if LOCKSTEP_VECTOR_BYTES == 64
    return _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
  }
  // Every NaN becomes 7e00 with its sign, as in c10::Half without the instruction.
  static LOCKSTEP_INLINE Floats quiet(Floats v) {
    return from_bits(v != v ? (bits(v) & 0x80000000u) | 0x7fc00000u : bits(v));
  }
};
#else
// The arithmetic of c10::Half (explained in torch/headeronly/util/Half.h), on vectors.
struct Half : Paired {
  static LOCKSTEP_INLINE Pair widen(const char* from) {
    const Words w = load<uint32_t>(from);
    return {widened(w << 16), widened(w & 0xffff0000u)};
  }
  static LOCKSTEP_INLINE Words narrow(Pair v) { return rounded(v.first) | (rounded(v.second) << 16); }
  static LOCKSTEP_INLINE Floats single(const char* from) { return widened(load_shorts(from) << 16); }
  static LOCKSTEP_INLINE void put_single(char* to, Floats v) { store_shorts(to, rounded(v)); }

 private:
  static LOCKSTEP_INLINE Floats widened(Words w) {  // a number in the upper half
    const Words magnitude = w & 0x7fffffffu;
    const Floats normal = from_bits((magnitude >> 3) + (0xe0u << 23)) * 0x1p-112f;
    const Floats denormal = from_bits((magnitude >> 16) | (126u << 23)) - 0.5f;
    const auto small = reinterpret_cast<SignedWords>(magnitude) < (1 << 26);
    return from_bits((w & 0x80000000u) | (small ? bits(denormal) : bits(normal)));
  }
  static LOCKSTEP_INLINE Words rounded(Floats v) {  // result in the lower half
    const Words w = bits(v), exponent = w & 0x7f800000u, least = all(0x38800000u);
    const Floats scaled = (from_bits(w & 0x7fffffffu) * 0x1p+112f) * 0x1p-110f;
    const auto tiny = reinterpret_cast<SignedWords>(exponent) < 0x38800000;
    const Words sum = bits(from_bits((tiny ? least : exponent) + 0x07800000u) + scaled);
    const Words magnitude = ((sum >> 13) & 0x7c00u) + (sum & 0x0fffu);
    return ((w & 0x80000000u) >> 16) | (v != v ? all(0x7e00u) : magnitude);
  }
};
#endif

}  // namespace
}  // namespace lockstep::detail

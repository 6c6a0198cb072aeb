// The kernels of reduce.cpp, one set for each vector width: reduce/vector.h, compiled three times.
//
// Their files are compiled for CPUs that this machine may not have. An inline function shared with other
// files would be emitted by each of them, and the linker might keep the version that only a newer CPU can
// run. So these files include no header of the standard library or of Lockstep except this one and
// fixed-width integers, and everything that they define is in an unnamed namespace, except the functions
// below, whose names differ.
#pragma once

#include <stddef.h>

namespace lockstep::detail {

enum class Number : unsigned char { f32, f64, bf16, f16, i8, i16, i32, i64, u8 };

enum class Fold : unsigned char { sum, product, min, max, bit_and, bit_or, bit_xor };

// Writes the fold of all inputs to every output, element by element. An output is one of the inputs, or
// shares no byte with any of them. Pointers need not be aligned.
struct FoldJob {
  const void* const* inputs;
  size_t input_count;  // at least 1
  void* const* outputs;
  size_t output_count;
  size_t bytes;    // size of one input
  size_t divisor;  // divides the sum, once; 0: none. Only for floating point with several inputs
};

// Converts bf16 or f16 to float, or back, as a fold widens its inputs and rounds its result.
struct ConvertJob {
  const void* from;
  void* to;  // shares no byte with from
  size_t count;
  bool widens;
};

// Return false for a pair that does not exist.
bool fold_portable(Number number, Fold fold, const FoldJob& job);
bool convert_portable(Number number, const ConvertJob& job);
#if defined(__x86_64__)
bool fold_avx2(Number number, Fold fold, const FoldJob& job);
bool convert_avx2(Number number, const ConvertJob& job);
bool fold_avx512(Number number, Fold fold, const FoldJob& job);
bool convert_avx512(Number number, const ConvertJob& job);
#endif

}  // namespace lockstep::detail

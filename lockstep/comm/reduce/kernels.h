// The kernels of reduce.cpp, one set for each width of vectors: vector.h, compiled three times.
//
// Their files are compiled for CPUs that this machine may not be. An inline function that they share with
// other files would be emitted by each, and the linker may keep the one that only a new CPU runs. So they
// include no header of the standard library or of ours but this one and fixed-width integers, and what
// they define is in an unnamed namespace, but for the functions below that are named for them.
#pragma once

#include <stddef.h>

namespace lockstep::detail {

enum class Number : unsigned char { f32, f64, bf16, f16, i8, i16, i32, i64, u8 };

enum class Fold : unsigned char { sum, product, min, max, bit_and, bit_or, bit_xor };

// Every output gets the fold of all inputs, element by element. An output is one of the inputs, or shares
// no byte with any. Pointers need not be aligned.
struct FoldJob {
  const void* const* inputs;
  size_t input_count;  // at least one
  void* const* outputs;
  size_t output_count;
  size_t bytes;    // of one input
  size_t divisor;  // of the sum, once; 0: none. Only of floating point, and of several inputs
};

// bf16 or f16 to float, or back: as a fold widens its inputs, and rounds its result.
struct ConvertJob {
  const void* from;
  void* to;  // shares no byte with from
  size_t count;
  bool widens;
};

// False for a pair that does not exist.
bool fold_portable(Number number, Fold fold, const FoldJob& job);
bool convert_portable(Number number, const ConvertJob& job);
#if defined(__x86_64__)
bool fold_avx2(Number number, Fold fold, const FoldJob& job);
bool convert_avx2(Number number, const ConvertJob& job);
bool fold_avx512(Number number, Fold fold, const FoldJob& job);
bool convert_avx512(Number number, const ConvertJob& job);
#endif

}  // namespace lockstep::detail

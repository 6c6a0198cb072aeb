// The kernels of reduce.cpp, one set for each width of vectors: reduce_vector.h, compiled three times.
//
// Their files are compiled for CPUs that this machine may not be. An inline function that they share with
// other files would be emitted by each, and the linker may keep the one that only a new CPU runs. So they
// include no header of the standard library or of ours but this one and fixed-width integers, and what
// they define is in an unnamed namespace, but for the function below that each is named for.
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
  size_t bytes;   // of one input
  bool averaged;  // divided by input_count, once; only sums of floating point, and of several inputs
};

// False for a pair that does not exist.
bool fold_portable(Number number, Fold fold, const FoldJob& job);
#if defined(__x86_64__)
bool fold_avx2(Number number, Fold fold, const FoldJob& job);
bool fold_avx512(Number number, Fold fold, const FoldJob& job);
#endif

}  // namespace lockstep::detail

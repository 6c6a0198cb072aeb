// The arithmetic of comm/reduce/reduce.h on a device, with the same bits: the aligned binary tree over the inputs,
// bfloat16 and float16 in float and rounded once, of several NaNs the leftmost.
#pragma once

#include <lockstep/comm/reduce/kernels.h>
#include <lockstep/kernels/kernels.h>

namespace lockstep::kernels {

// Of one fold: pointers travel with the launch.
constexpr int kMostFolded = 64;

// job's pointers are to memory that the current device reaches. False for a pair that does not exist.
bool fold(detail::Number number, detail::Fold fold, const detail::FoldJob& job, Stream stream);

}  // namespace lockstep::kernels

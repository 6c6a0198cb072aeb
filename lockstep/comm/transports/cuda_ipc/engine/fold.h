// The arithmetic of comm/reduce on a device, with the same bits: the aligned binary tree over the inputs,
// bfloat16 and float16 in float and rounded once; of several NaNs the leftmost is kept.
#pragma once

#include <lockstep/comm/reduce/kernels.h>
#include <lockstep/kernels/kernels.h>

namespace lockstep::kernels {

// Largest number of inputs of one fold: the pointers are launch arguments.
constexpr int kMostFolded = 64;

// job's pointers must be accessible from the current device. Returns false for a pair that does not exist.
bool fold(detail::Number number, detail::Fold fold, const detail::FoldJob& job, Stream stream);

}  // namespace lockstep::kernels

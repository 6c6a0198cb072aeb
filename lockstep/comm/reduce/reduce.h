// The arithmetic of reductions, without LibTorch. The order of a sum is fixed per element: the aligned
// binary tree over ranks, ((0+1)+(2+3))+..., in float for bfloat16 and float16, rounded once. So the
// bits depend on the inputs alone, and p ranks give those of one rank that adds p tensors by the tree.
// Of several NaNs the leftmost stays. LOCKSTEP_SIMD chooses the instructions (level.h); the bits are
// the same with all of them.
#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include <lockstep/comm/call.h>
#include <lockstep/comm/reduce/kernels.h>

namespace lockstep::detail {

// Whether reduce_tree has this pair: any arithmetic on numbers, bitwise on integers, avg on floating
// point; booleans are bytes of 0 and 1 (sum is or, product is and).
bool reducible(Dtype dtype, ReduceOp op);
// True for the integers, whose averages the two functions below have although reducible() says no: Group offers
// none, and Python programs expect NCCL's. It is the sum, which wraps around, divided and truncated toward zero.
bool averages_truncated(Dtype dtype);

std::size_t item_size(Dtype dtype);

// output[i] = the tree over inputs[*][i], for count elements. output may be one of the inputs.
// One pass: reads every input once, writes once. ranks: over which the inputs are sums already, where they
// are: an average divides by it.
void reduce_tree(Dtype dtype, ReduceOp op, std::span<const void* const> inputs, void* output,
                 std::size_t count, std::size_t ranks = 0);

// A subtree's sum that is to be added to another's must not have been rounded: it is kept in this type.
// float32 for bfloat16 and float16, else the dtype itself.
Dtype accumulator(Dtype dtype);
// Where the two differ: to the accumulator, and back as a result is rounded.
void widen(Dtype dtype, const void* input, void* output, std::size_t count);
void narrow(Dtype dtype, const void* input, void* output, std::size_t count);

// The same into every output, in the same pass. Each output is one of the inputs, or apart from them all:
// given p buffers as inputs and as outputs, it is an all-reduce in place.
void reduce_tree_to_all(Dtype dtype, ReduceOp op, std::span<const void* const> inputs,
                        std::span<void* const> outputs, std::size_t count);

// The same by arithmetic of somebody else's, such as a device's; folds says false for a pair that it lacks.
using Folds = std::function<bool(Number number, Fold fold, const FoldJob& job)>;
void reduce_tree_to_all(const Folds& folds, Dtype dtype, ReduceOp op, std::span<const void* const> inputs,
                        std::span<void* const> outputs, std::size_t count);

}  // namespace lockstep::detail

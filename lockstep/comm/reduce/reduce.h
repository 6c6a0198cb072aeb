// The arithmetic of reductions. Does not use LibTorch. The order of a sum is fixed per element: the aligned
// binary tree over ranks, ((0+1)+(2+3))+..., in float for bfloat16 and float16, rounded once. So the bits
// depend only on the inputs, and p ranks give the same bits as one rank that adds p tensors by the tree. Of
// several NaNs the leftmost is kept. LOCKSTEP_SIMD selects the instructions (reduce/level.h); the bits are
// the same with all of them.
#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include <lockstep/comm/call.h>
#include <lockstep/comm/reduce/kernels.h>

namespace lockstep::detail {

// True if reduce_tree supports this pair: arithmetic on all numbers, bitwise on integers, avg on floating
// point. Booleans are bytes of 0 and 1 (sum is or, product is and).
bool reducible(Dtype dtype, ReduceOp op);
// True for the integers. The two functions below compute their averages although reducible() returns false:
// Group offers none, but Python programs expect NCCL's. The sum, which wraps around, is divided and truncated
// toward zero.
bool averages_truncated(Dtype dtype);

std::size_t item_size(Dtype dtype);

// output[i] = the tree over inputs[*][i], for count elements. output may be one of the inputs. One pass:
// reads every input once, writes once. ranks: the number of ranks by which an average divides, if the inputs
// are already sums.
void reduce_tree(Dtype dtype, ReduceOp op, std::span<const void* const> inputs, void* output,
                 std::size_t count, std::size_t ranks = 0);

// The type for the sum of a subtree, which must not be rounded before it is added to another: float32 for
// bfloat16 and float16, else the dtype itself.
Dtype accumulator(Dtype dtype);
// If the two differ: conversion to the accumulator, and back with a result's rounding.
void widen(Dtype dtype, const void* input, void* output, std::size_t count);
void narrow(Dtype dtype, const void* input, void* output, std::size_t count);

// The same into every output, in one pass. Each output is one of the inputs, or separate from all of them:
// with p buffers as both inputs and outputs, it is an all-reduce in place.
void reduce_tree_to_all(Dtype dtype, ReduceOp op, std::span<const void* const> inputs,
                        std::span<void* const> outputs, std::size_t count);

// The same with another implementation of the folds, such as a device's; folds returns false for an
// unsupported pair.
using Folds = std::function<bool(Number number, Fold fold, const FoldJob& job)>;
void reduce_tree_to_all(const Folds& folds, Dtype dtype, ReduceOp op, std::span<const void* const> inputs,
                        std::span<void* const> outputs, std::size_t count);

}  // namespace lockstep::detail

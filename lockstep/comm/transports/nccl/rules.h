// What Group must know about LibTorch's NCCL. Does not use CUDA's headers.
#pragma once

#include <lockstep/comm/c10d/transport.h>
#include <lockstep/comm/reduce/reduce.h>

namespace lockstep::detail {

// Messages between two ranks that are not coalesced share one stream on each side, in both directions, so
// both ranks must start them in the same order.
inline Transport::Traits nccl_traits() {
  return {.avg = true,
          .tags = false,
          .keeps_inputs = true,
          .blocks_host = false,
          .captures = true,
          .on_device = true};
}

inline bool nccl_reduces(Dtype dtype, ReduceOp op) {
  const bool bitwise = op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
  // and, or of booleans are min and max of 0 and 1
  const bool boolean = dtype == Dtype::boolean && op != ReduceOp::BXOR;
  return reducible(dtype, op) && dtype != Dtype::int16 && (!bitwise || boolean);
}

}  // namespace lockstep::detail

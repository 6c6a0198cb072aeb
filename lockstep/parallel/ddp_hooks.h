// Communication hooks: what DistributedDataParallel sends instead of the gradients as they are.
//
//   ddp.register_comm_hook(lockstep::bf16_compress_hook());
//   ddp.register_comm_hook(lockstep::power_sgd_hook({.matrix_approximation_rank = 2}));
#pragma once

#include <cstdint>

#include <lockstep/parallel/ddp/bucket.h>

namespace lockstep {

// The average, as without a hook.
CommHook allreduce_hook();
// Rounded to bfloat16 or float16 before they are sent; summed as floats, rounded once. Half the bytes.
CommHook bf16_compress_hook();
CommHook fp16_compress_hook();

struct PowerSgdOptions {
  std::int64_t matrix_approximation_rank = 1;
  std::int64_t start_power_sgd_iter = 1000;  // steps that are averaged as they are; at least 2
  double min_compression_rate = 2;           // a matrix is compressed if that saves so much
  bool use_error_feedback = true;            // what was lost is added to the next step's gradient
  bool warm_start = true;                    // begins with the last step's factors
  std::uint64_t random_seed = 0;             // the same on every rank
};

// PowerSGD (Vogels et al. 2019): each matrix M becomes P Q^T of low rank. P = M Q is averaged and made
// orthogonal, Q = M^T P is averaged: (n + m) * rank numbers are sent instead of n * m. Vectors, and what
// would save too little, are averaged as they are.
CommHook power_sgd_hook(PowerSgdOptions options = {});

}  // namespace lockstep

// Communication hooks: replace the all-reduce of gradient buckets in DistributedDataParallel.
//
//   ddp.register_comm_hook(lockstep::bf16_compress_hook());
//   ddp.register_comm_hook(lockstep::power_sgd_hook({.matrix_approximation_rank = 2}));
#pragma once

#include <cstdint>

#include <lockstep/parallel/ddp/bucket.h>

namespace lockstep {

// Plain average, as without a hook.
CommHook allreduce_hook();
// Round gradients to bfloat16 or float16 before sending, sum in float and round once. Halves the traffic.
CommHook bf16_compress_hook();
CommHook fp16_compress_hook();

struct PowerSgdOptions {
  std::int64_t matrix_approximation_rank = 1;
  std::int64_t start_power_sgd_iter = 1000;  // Number of uncompressed steps at the start; at least 2.
  double min_compression_rate = 2;           // A matrix is compressed only if that saves this factor.
  bool use_error_feedback = true;            // Add the compression error to the next step's gradient.
  bool warm_start = true;                    // Start from the previous step's factors.
  std::uint64_t random_seed = 0;             // Must be the same on every rank.
};

// PowerSGD (Vogels et al. 2019): approximates each n x m matrix M by P Q^T of low rank. P = M Q is averaged
// and orthogonalised, then Q = M^T P is averaged, so (n + m) * rank numbers are sent instead of n * m.
// Vectors, and matrices that would save too little, are averaged uncompressed.
CommHook power_sgd_hook(PowerSgdOptions options = {});

}  // namespace lockstep

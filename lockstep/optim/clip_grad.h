// Gradient clipping, like torch.nn.utils.clip_grad_norm_ and clip_grad_value_.
//
//   loss.backward();
//   auto norm = lockstep::clip_grad_norm(model->parameters(), 1.0);
//   optimizer.step();
//
// With a GradScaler, call scaler.unscale_(optimizer) first.
#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <lockstep/comm/group.h>

namespace lockstep {

struct ClipGradNormOptions {
  double norm_type = 2;             // infinity: the maximum absolute value
  bool error_if_nonfinite = false;  // throw Error if the norm is infinite or NaN
  // The ranks over which the parameters are distributed (pipeline stages, split layers). Without it each rank
  // would clip by the norm of its own part. Not for replicas: their gradients, and so their norms, are equal.
  std::optional<Group> group = {};
  // With a group whose ranks share some parameters: the parameters that this rank counts, so that each is
  // counted once. This rank's other gradients are scaled but do not count.
  std::optional<std::vector<at::Tensor>> counted = {};
};

// Multiplies the gradients in place by min(1, max_norm / (norm + 1e-6)). Returns the norm before clipping, of
// all gradients taken as one vector; on CUDA without waiting for it. Parameters without a gradient are
// skipped.
//
// With a group, every rank must call it, even without gradients. The norm is then that of all ranks'
// gradients. Powers are summed in double in a fixed order, the aligned binary tree over ranks, so every rank
// gets the same bits.
at::Tensor clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm,
                          ClipGradNormOptions options = {});

// Clamps each element of each gradient to [-clip_value, clip_value], in place.
void clip_grad_value(const std::vector<at::Tensor>& parameters, double clip_value);

}  // namespace lockstep

// Keeps gradients from growing beyond a bound, as torch.nn.utils.clip_grad_norm_ and clip_grad_value_ do.
//
//   loss.backward();
//   auto norm = lockstep::clip_grad_norm(model->parameters(), 1.0);
//   optimizer.step();
//
// With a GradScaler, scaler.unscale_(optimizer) comes first.
#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <lockstep/comm/group.h>

namespace lockstep {

struct ClipGradNormOptions {
  double norm_type = 2;             // infinity: the largest absolute value
  bool error_if_nonfinite = false;  // an Error instead of gradients that are no numbers
  // The ranks over which the parameters are spread, each with a part of its own (a pipeline, split layers):
  // without it each would clip by the norm of its part. Not for replicas: their gradients are the same
  // everywhere, and so is their norm.
  std::optional<Group> group = {};
  // With a group whose ranks have some parameters in common: those that this rank counts, so that each is
  // counted once. The others of its gradients are only multiplied.
  std::optional<std::vector<at::Tensor>> counted = {};
};

// Gradients are multiplied in place by min(1, max_norm / (norm + 1e-6)). Returns the norm before that, of all
// gradients as one vector; on CUDA without waiting for it. Parameters without gradient count for nothing.
//
// With a group every rank calls it, also one that has no gradients. Its norm is that of all ranks' gradients:
// powers are summed in double by the tree of ARCHITECTURE.md, so that every rank gets the same bits.
at::Tensor clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm,
                          ClipGradNormOptions options = {});

// Each number of each gradient is brought to [-clip_value, clip_value], in place.
void clip_grad_value(const std::vector<at::Tensor>& parameters, double clip_value);

}  // namespace lockstep

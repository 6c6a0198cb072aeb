// Replicas of a model: broadcasts them and checks that they are equal.
//
//   lockstep::check_replicas(*model, world.group());   // throws if the ranks' parameters differ
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/group.h>
#include <torch/nn/module.h>

namespace lockstep {

// Reports a difference that the program caused and that no rank can recover from.
class DriftError : public Error {
 public:
  using Error::Error;
};

struct CheckReplicasOptions {
  // Compare buffers too. Ranks may have their own, such as running statistics.
  bool buffers = false;
  std::vector<std::string> ignore = {};  // Names of parameters, buffers and submodules that may differ.
};

// Checks that the ranks' parameters are bitwise equal, by comparing hashes: 8 bytes per rank, or 8 bytes per
// tensor if some differ. Collective: every rank must call it. Throws DriftError on every rank, with the first
// tensor that differs and the ranks that differ from the majority.
void check_replicas(const torch::nn::Module& module, Group group, CheckReplicasOptions options = {},
                    Site site = Site::current());

namespace detail {

// Returns the entry of the list that equals the name or names a module around it, if any.
std::optional<std::string> listed(const std::vector<std::string>& list, const std::string& name);

// Broadcasts the root's tensors, in place. The list must be the same on every rank; dtypes and devices may
// vary. Autograd does not see the change: tensors saved by an earlier forward remain usable.
void broadcast_tensors(Group& group, const std::vector<at::Tensor>& tensors, int root);

// Throws ConfigError on every rank if any rank's lines differ from rank 0's, with the first difference.
void require_same_lines(Group group, const std::vector<std::string>& lines, const std::string& what);

}  // namespace detail
}  // namespace lockstep

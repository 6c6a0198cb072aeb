// Replicas of a model: made equal, and checked to be.
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

// What differs is the program's doing, and no rank can go on from it: an Error of its own.
class DriftError : public Error {
 public:
  using Error::Error;
};

struct CheckReplicasOptions {
  bool buffers = false;                  // also those, which ranks may have of their own (running statistics)
  std::vector<std::string> ignore = {};  // names of parameters, buffers and submodules that may differ
};

// Every rank calls it. Compares every bit, by hashes: 8 bytes a tensor are sent, and only if some differ.
// Throws DriftError on every rank, naming the first tensor that differs and the ranks that are not as most
// are.
void check_replicas(const torch::nn::Module& module, Group group, CheckReplicasOptions options = {},
                    Site site = Site::current());

namespace detail {

// Whether the name, or a module around it, is listed; says which.
std::optional<std::string> listed(const std::vector<std::string>& list, const std::string& name);

// The root's tensors to all, in place; the same list on every rank, of any dtypes and devices. To autograd
// they are what they were: what an earlier forward has saved of them can still be used.
void broadcast_tensors(Group& group, const std::vector<at::Tensor>& tensors, int root);

// Throws ConfigError on every rank if one's lines are not rank 0's, with the first that differs.
void require_same_lines(Group group, const std::vector<std::string>& lines, const std::string& what);

}  // namespace detail
}  // namespace lockstep

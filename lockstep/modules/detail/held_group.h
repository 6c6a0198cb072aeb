// Wraps a group as a value that autograd can save with a node.
#pragma once

#include <utility>

#include <lockstep/comm/group.h>
#include <torch/custom_class.h>

namespace lockstep::detail {

struct HeldGroup : torch::CustomClassHolder {
  explicit HeldGroup(Group given) : group(std::move(given)) {}
  Group group;
};

}  // namespace lockstep::detail

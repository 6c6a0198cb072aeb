// How a StepGraph learns about the optimizers that its step runs.
#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::detail {

class GraphedOptimizers {
 public:
  struct User {
    const void* optimizer;
    std::vector<at::Tensor> parameters, state;  // everything that its step() writes to
    // Uploads changed options to the device. Returns false if the state has been replaced, so that a captured
    // graph is no longer valid.
    std::function<bool()> before_replay;
  };
  std::vector<User> users;

  void saw(User user) {
    for (auto& each : users)
      if (each.optimizer == user.optimizer) {
        each = std::move(user);
        return;
      }
    users.push_back(std::move(user));
  }

  // The instance of this thread while a StepGraph runs a step; null otherwise.
  static GraphedOptimizers*& current() {
    thread_local GraphedOptimizers* watch = nullptr;
    return watch;
  }
};

}  // namespace lockstep::detail

// What a StepGraph hears of the optimizers that its step runs.
#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::detail {

class GraphedOptimizers {
 public:
  struct User {
    const void* optimizer;
    std::vector<at::Tensor> parameters, state;  // all that its step() writes to
    // Brings options that have changed to the device. False: its state is elsewhere now, and a graph is of no
    // use.
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

  // Of this thread, while a StepGraph runs a step; null otherwise.
  static GraphedOptimizers*& current() {
    thread_local GraphedOptimizers* watch = nullptr;
    return watch;
  }
};

}  // namespace lockstep::detail

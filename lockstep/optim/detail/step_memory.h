// Reports an optimizer's memory to a profiler: parameters, gradients and state.
#pragma once

#include <string>

#include <lockstep/base/span.h>
#include <lockstep/modules/detail/unready_gradient.h>
#include <torch/optim/optimizer.h>

namespace lockstep::detail {

// state_bytes(state) returns the size of one parameter's state.
template <typename StateBytes>
void tell_memory(torch::optim::Optimizer& optimizer, StateBytes state_bytes) {
  const auto sink = span_sink();
  if (!sink) return;
  std::size_t parameters = 0, gradients = 0, state = 0;
  for (const auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params()) {
      parameters += parameter.nbytes();
      if (parameter.grad().defined() && !unready_text(parameter.grad()))
        gradients += parameter.grad().nbytes();
    }
  for (const auto& [parameter, each] : optimizer.state()) state += state_bytes(*each);
  sink->note("memory.parameters", std::to_string(parameters));
  sink->note("memory.gradients", std::to_string(gradients));
  sink->note("memory.optimizer", std::to_string(state));
}

inline std::size_t bytes_if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.nbytes() : 0;
}

}  // namespace lockstep::detail

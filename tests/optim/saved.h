// Returns what torch::save writes for an optimizer.
#pragma once

#include <sstream>
#include <string>

#include <torch/torch.h>

namespace lockstep::testing {

template <typename Optimizer>
std::string saved(const Optimizer& optimizer) {
  std::ostringstream out;
  torch::save(optimizer, out);
  return out.str();
}

}  // namespace lockstep::testing

// Which pieces of a model go together. No LibTorch.
#pragma once

#include <vector>

namespace lockstep::detail {

// How many pieces each of the stages has, in order and at least one, such that the most expensive stage costs
// as little as can be; of several such cuts the one whose early stages are larger.
std::vector<int> balanced_cut(const std::vector<double>& costs, int stages);

}  // namespace lockstep::detail

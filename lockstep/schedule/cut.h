// Divides the pieces of a model among stages. No LibTorch.
#pragma once

#include <vector>

namespace lockstep::detail {

// Returns the number of pieces in each stage, in order, at least one each. Minimises the cost of the most
// expensive stage; ties go to the cut with larger early stages.
std::vector<int> balanced_cut(const std::vector<double>& costs, int stages);

}  // namespace lockstep::detail

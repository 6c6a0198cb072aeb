// What a rank can see by itself is wrong with a call of c10d's. What its peers give and expect is compared
// between the ranks. Group has looked at its own calls already, c10d's callers have not.
// Each throws c10::Error, which says what was expected, what was found and what to do.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <lockstep/comm/call.h>

namespace lockstep::detail {

const at::Tensor& only(const std::vector<at::Tensor>& tensors);
void check_pairs(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);
void check_operands(const Call& call, const std::vector<at::Tensor>& inputs,
                    const std::vector<at::Tensor>& outputs);
// truncates: the engine has averages of integers.
void check_reduction(const Call& call, bool truncates);

}  // namespace lockstep::detail

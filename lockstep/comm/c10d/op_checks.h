// Checks of a c10d call that a rank can make alone; what peers send and expect is compared between the ranks.
// Group has already checked its own calls, but callers of c10d have not. Each function throws c10::Error,
// which reports what was expected, what was found and what to do.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <lockstep/comm/call.h>

namespace lockstep::detail {

const at::Tensor& only(const std::vector<at::Tensor>& tensors);
void check_pairs(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);
void check_operands(const Call& call, const std::vector<at::Tensor>& inputs,
                    const std::vector<at::Tensor>& outputs);
// truncates: the engine supports averages of integers.
void check_reduction(const Call& call, bool truncates);

}  // namespace lockstep::detail

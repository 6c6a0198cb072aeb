// How many floating point operations an operator of LibTorch does: products, convolutions, attention. The
// others are counted as none, as is the custom.
#pragma once

#include <cstdint>

#include <ATen/record_function.h>

namespace lockstep::profile {

// An operator's inputs can be looked at when it begins, and no more when it ends; its outputs then.
struct Flops {
  std::int64_t whole = 0;
  std::int64_t per_output = 0;  // for each element of the first output
};
Flops flops_of(const at::RecordFunction& operation);
std::int64_t elements_of_output(const at::RecordFunction& operation);

}  // namespace lockstep::profile

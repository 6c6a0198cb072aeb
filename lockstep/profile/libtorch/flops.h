// Number of floating-point operations of a LibTorch operator. As usual, only products, convolutions and
// attention count.
#pragma once

#include <cstdint>

#include <ATen/record_function.h>

namespace lockstep::profile {

// Inputs can be read only when an operator begins, and outputs only when it ends, hence two parts.
struct Flops {
  std::int64_t whole = 0;
  std::int64_t per_output = 0;  // per element of the first output
};
Flops flops_of(const at::RecordFunction& operation);
std::int64_t elements_of_output(const at::RecordFunction& operation);

}  // namespace lockstep::profile

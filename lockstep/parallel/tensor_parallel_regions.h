// Conversions of a tensor between layouts over a group: the autograd functions behind tensor and sequence
// parallelism. In each, backward is the adjoint of forward:
//
//   function                 forward             backward            between
//   copy_to_group            -                   all-reduce          whole tensor -> work that is split
//   reduce_from_group        all-reduce          -                   partial sums -> whole tensor
//   gather_from_group        all-gather          own slice           slices -> whole tensor
//   scatter_to_group         own slice           all-gather          whole tensor -> slices
//   gather_sequence          all-gather          reduce-scatter      slices -> work that is split
//   reduce_scatter_sequence  reduce-scatter      all-gather          partial sums -> slices
//
// A "whole tensor" has the same values on every rank, and so has its gradient. Every rank must call these
// functions in the same order, and backward must reach the same ones on every rank. In a group of one rank
// they return the input itself. Slices are equal in size; a dimension may be negative. backward() with
// create_graph throws ConfigError.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <lockstep/comm/group.h>

namespace lockstep {

at::Tensor copy_to_group(const at::Tensor& input, const Group& group);
at::Tensor reduce_from_group(const at::Tensor& input, const Group& group);
at::Tensor gather_from_group(const at::Tensor& input, const Group& group, std::int64_t dim = -1);
at::Tensor scatter_to_group(const at::Tensor& input, const Group& group, std::int64_t dim = -1);
at::Tensor gather_sequence(const at::Tensor& input, const Group& group, std::int64_t dim = 1);
at::Tensor reduce_scatter_sequence(const at::Tensor& input, const Group& group, std::int64_t dim = 1);

namespace detail {

// reduce_from_group that may overwrite the input. The caller must not need the input afterwards.
at::Tensor reduce_from_group_in_place(at::Tensor input, const Group& group);

// For parameters that each rank applies to its slice of the sequence: sums both gradients in one exchange.
// bias may be undefined.
struct Copied {
  at::Tensor weight, bias;
};
Copied copy_to_group(const at::Tensor& weight, const at::Tensor& bias, const Group& group);

// Without autograd. joined() concatenates the ranks' slices along a dimension; own_slice() returns this
// rank's slice of each of `parts` equal parts.
at::Tensor joined(const at::Tensor& slice, Group group, std::int64_t dim, const char* tag = "full_state");
at::Tensor own_slice(const at::Tensor& whole, const Group& group, std::int64_t dim, int parts = 1);

}  // namespace detail
}  // namespace lockstep

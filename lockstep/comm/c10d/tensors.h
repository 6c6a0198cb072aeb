// Between LibTorch's tensors and what engines take.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <lockstep/comm/call.h>
#include <lockstep/comm/group/work_state.h>

namespace lockstep::detail {

Dtype dtype_of(at::ScalarType type);

// ConfigError unless the tensor can be sent: defined, strided, plain. `writable`: and can be written
// to, no two of its elements in one place.
void check_tensor(const at::Tensor& tensor, std::string_view what, bool writable);

// Whether the two reach over the same memory.
bool overlap(const at::Tensor& a, const at::Tensor& b);
// Where a result would be written over what a rank has yet to read, that is read from a copy, which must live
// as long as the part. In place is in order where this rank's own piece takes its own result.
std::vector<at::Tensor> copy_what_is_written_over(Op& part, at::Device device = at::kCPU);

// The call that describes a tensor.
Call describe_call(Operation operation, const at::Tensor& tensor, Site site);

// Dense memory with the tensor's values.
at::Tensor dense(const at::Tensor& tensor);
// Dense memory whose contents are the tensor's when the operation is complete; with its values now, if
// the operation reads them.
at::Tensor dense_target(WorkState& pending, const at::Tensor& tensor, bool reads);

// One-dimensional views for the engine: bytes where data only moves and the engine does not know every
// dtype; numbers where it is to reduce them.
at::Tensor to_move(const Transport& engine, const at::Tensor& tensor);
at::Tensor to_reduce(const Transport& engine, const at::Tensor& tensor);
// The engine's reduction: avg is a sum where the engine has no avg, bool reduces as 0 and 1.
ReduceOp engine_reduction(const Transport& engine, Dtype dtype, ReduceOp op);
c10d::ReduceOp to_c10d(ReduceOp op);
ReduceOp from_c10d(const c10d::ReduceOp& op);  // c10::Error for those that we do not have

}  // namespace lockstep::detail

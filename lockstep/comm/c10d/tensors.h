// Conversion between LibTorch's tensors and what engines take.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <lockstep/comm/call.h>
#include <lockstep/comm/group/work_state.h>

namespace lockstep::detail {

Dtype dtype_of(at::ScalarType type);

// Throws ConfigError unless the tensor can be sent: defined, strided and not quantized. `writable`: it must
// also have no elements that overlap in memory.
void check_tensor(const at::Tensor& tensor, std::string_view what, bool writable);

// True if the two tensors use overlapping memory.
bool overlap(const at::Tensor& a, const at::Tensor& b);
// Copies the inputs that a result would overwrite before a rank has read them. The copies must live as long
// as the operation. An in-place call is fine if this rank's own piece receives its own result.
std::vector<at::Tensor> copy_what_is_written_over(Op& part, at::Device device = at::kCPU);

// The call that describes an operation on the tensor.
Call describe_call(Operation operation, const at::Tensor& tensor, Site site);

// Returns the tensor's values in dense memory.
at::Tensor dense(const at::Tensor& tensor);
// Returns dense memory whose contents are copied to the tensor when the operation completes. If `reads`, it
// starts with the tensor's values.
at::Tensor dense_target(WorkState& pending, const at::Tensor& tensor, bool reads);

// One-dimensional views for the engine: bytes if data only moves and the engine does not support every dtype,
// numbers if the engine reduces them.
at::Tensor to_move(const Transport& engine, const at::Tensor& tensor);
at::Tensor to_reduce(const Transport& engine, const at::Tensor& tensor);
// The reduction to request from the engine: sum for avg if the engine has no avg; bool reduces as 0 and 1.
ReduceOp engine_reduction(const Transport& engine, Dtype dtype, ReduceOp op);
c10d::ReduceOp to_c10d(ReduceOp op);
ReduceOp from_c10d(const c10d::ReduceOp& op);  // c10::Error for unsupported ones

}  // namespace lockstep::detail

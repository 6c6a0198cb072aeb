// Views of several tensors in one block of memory, and one-dimensional views of a tensor's memory.
#pragma once

#include <cstdint>

#include <ATen/ATen.h>
#include <lockstep/comm/group.h>

namespace lockstep::detail {

// Uses the parameter's strides if its elements are dense in memory, so that autograd and optimizers see the
// layout that they would see without DDP.
inline at::Tensor view_of(const at::Tensor& buffer, std::int64_t offset, const at::Tensor& param) {
  // Not a view as autograd sees it, because zero_grad(false) detaches gradients in place, which fails for
  // views.
  at::AutoDispatchBelowADInplaceOrView untracked;
  if (param.is_non_overlapping_and_dense())
    return buffer.as_strided(param.sizes(), param.strides(), buffer.storage_offset() + offset);
  return buffer.narrow(0, offset, param.numel()).view(param.sizes());
}

// View of `count` elements from `begin`, in memory order. The tensor must be dense in memory.
inline at::Tensor memory_of(const at::Tensor& tensor, std::int64_t begin, std::int64_t count) {
  at::AutoDispatchBelowADInplaceOrView untracked;
  return tensor.as_strided({count}, {1}, tensor.storage_offset() + begin);
}

// Allocates memory for tensors like this one, in memory that the transport can reach directly if it has any.
inline at::Tensor flat_memory(Group& group, std::int64_t elements, at::ScalarType type,
                              const at::Tensor& like) {
  const bool reaches = like.is_cpu() || (like.is_cuda() && group.backend(at::kCUDA) == "cuda_ipc");
  if (reaches && group.size() > 1) return group.allocate({elements}, type, like.device());
  return at::empty({elements}, like.options().dtype(type).requires_grad(false));
}

// Ignores the strides of dimensions with one element.
inline bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  for (std::int64_t d = 0; d < a.dim(); ++d)
    if (a.size(d) != 1 && a.stride(d) != b.stride(d)) return false;
  return true;
}

}  // namespace lockstep::detail

// Tensors in one piece of memory, and the memory of a tensor as one dimension.
#pragma once

#include <cstdint>

#include <ATen/ATen.h>
#include <lockstep/comm/group.h>

namespace lockstep::detail {

// The parameter's strides where its elements fill their memory, so that autograd and optimizers see the
// layout they would see without us.
inline at::Tensor view_of(const at::Tensor& buffer, std::int64_t offset, const at::Tensor& param) {
  // Not a view to autograd: zero_grad(false) detaches gradients in place, which views refuse.
  at::AutoDispatchBelowADInplaceOrView untracked;
  if (param.is_non_overlapping_and_dense())
    return buffer.as_strided(param.sizes(), param.strides(), buffer.storage_offset() + offset);
  return buffer.narrow(0, offset, param.numel()).view(param.sizes());
}

// Elements from `begin` on, in the order in which they lie in memory. Of one whose elements fill their
// memory.
inline at::Tensor memory_of(const at::Tensor& tensor, std::int64_t begin, std::int64_t count) {
  at::AutoDispatchBelowADInplaceOrView untracked;
  return tensor.as_strided({count}, {1}, tensor.storage_offset() + begin);
}

// Memory for tensors like this one, that the transport reaches where it can.
inline at::Tensor flat_memory(Group& group, std::int64_t elements, at::ScalarType type,
                              const at::Tensor& like) {
  const bool reaches = like.is_cpu() || (like.is_cuda() && group.backend(at::kCUDA) == "cuda_ipc");
  if (reaches && group.size() > 1) return group.allocate({elements}, type, like.device());
  return at::empty({elements}, like.options().dtype(type).requires_grad(false));
}

// Strides of a dimension with one element do not count.
inline bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  for (std::int64_t d = 0; d < a.dim(); ++d)
    if (a.size(d) != 1 && a.stride(d) != b.stride(d)) return false;
  return true;
}

}  // namespace lockstep::detail

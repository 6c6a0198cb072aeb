// Helpers for modules with CUDA kernels, and for Adam: when to use the kernels, and on which stream.
#pragma once

#include <initializer_list>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/kernels/kernels.h>

namespace lockstep::nn::detail {

inline bool has_kernel(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return tensor.is_cuda() && kernels::available() && tensor.layout() == at::kStrided && tensor.numel() > 0 &&
         !tensor.is_neg() && (type == at::kFloat || type == at::kBFloat16 || type == at::kHalf);
}

// Kernels need alignment to 16 bytes, and read memory directly, where a negated view has the wrong signs.
inline bool is_dense(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_neg() &&
         reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}
// The tensor itself if it is dense, else a dense copy.
inline at::Tensor dense(const at::Tensor& tensor) {
  return is_dense(tensor) ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

// True if all defined tensors have one device and type, and autocast will not convert them.
inline bool alike(std::initializer_list<const at::Tensor*> tensors) {
  const auto& first = **tensors.begin();
  if (at::autocast::is_autocast_enabled(first.device().type())) return false;
  for (const auto* each : tensors)
    if (each->defined() && (each->scalar_type() != first.scalar_type() || each->device() != first.device()))
      return false;
  return true;
}

inline kernels::Number number_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kBFloat16: return kernels::Number::bfloat16;
    case at::kHalf: return kernels::Number::float16;
    default: return kernels::Number::float32;
  }
}

inline kernels::Stream stream_of(const at::Tensor& tensor) {
  const c10::impl::VirtualGuardImpl guard(tensor.device().type());
  return guard.getStream(tensor.device()).native_handle();
}

// The kernels are not differentiable themselves, so a second derivative would be silently wrong.
inline void refuse_second_derivative(const char* what) {
  if (at::GradMode::is_enabled())
    throw ConfigError(
        fmt::format("{} has no second derivative on CUDA, so backward cannot use create_graph; use "
                    "LibTorch's own operator",
                    what));
}

inline const void* data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}
inline void* mutable_data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}
inline at::Tensor scratch_of(const at::Tensor& like, std::size_t floats) {
  return at::empty({static_cast<std::int64_t>(floats)}, like.options().dtype(at::kFloat));
}

}  // namespace lockstep::nn::detail

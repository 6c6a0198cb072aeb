// What the modules with kernels of our own share, and Adam: when those are used, and on which stream.
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

// Kernels take 16 bytes at a time, and memory as it is: a negated view has the other signs there.
inline bool is_dense(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_neg() &&
         reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}
// Itself, or a copy that is.
inline at::Tensor dense(const at::Tensor& tensor) {
  return is_dense(tensor) ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

// On one device, of one type, and with autocast not about to choose another; undefined ones do not count.
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

// Kernels give no graph of their own: a second derivative would be wrong in silence.
inline void refuse_second_derivative(const char* what) {
  if (at::GradMode::is_enabled())
    throw ConfigError(
        fmt::format("{} has no second derivative on CUDA: backward with create_graph is not allowed; "
                    "LibTorch's own has one",
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

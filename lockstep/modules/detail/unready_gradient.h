// A gradient that must not be read: it has the shape of its parameter and no memory. An operation that reads it,
// LibTorch's own included, throws an error with the given text. So an optimizer or clip_grad_norm_ cannot take a
// gradient for missing that is only incomplete, or stored elsewhere.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace lockstep::detail {

// The storage that unready gradients of one device share.
c10::Storage unready_storage(at::Device device, std::string text);
at::Tensor unready_gradient(const at::Tensor& parameter, const c10::Storage& storage);

// The text, or null if the gradient may be read. An undefined gradient may.
const std::string* unready_text(const at::Tensor& gradient);
// Throws ConfigError with the text.
void require_ready(const at::Tensor& gradient);
// Moves p.grad() out of the parameter. Returns an undefined tensor for an unready gradient.
at::Tensor take_gradient(const at::Tensor& parameter);

}  // namespace lockstep::detail

// Runs operations in lower precision where that is safe, like Python's torch.autocast, for the duration of a
// scope:
//
//   at::Tensor loss;
//   {
//     lockstep::Autocast guard(at::kCPU, at::kBFloat16);
//     loss = torch::mse_loss(model(inputs), labels);
//   }
//   loss.backward();
//
// Affects only the current thread. Scopes nest; an inner one with {.enabled = false} disables autocast. Casts
// of weights are cached until the outermost scope ends, so call the optimizer's step outside.
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace lockstep {

struct AutocastOptions {
  bool enabled = true;
  std::optional<bool> cache_enabled = {};  // unset: inherited from the enclosing scope
};

class Autocast {
 public:
  // dtype: kBFloat16 or kHalf; unset: LibTorch's default, bfloat16 on the CPU and float16 on CUDA. Throws
  // ConfigError for other dtypes, and for devices without autocast.
  explicit Autocast(at::DeviceType device, std::optional<at::ScalarType> dtype = {},
                    AutocastOptions options = {});
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  at::DeviceType device_;
  bool enabled_before_;
  bool cache_enabled_before_;
  at::ScalarType dtype_before_;
};

}  // namespace lockstep

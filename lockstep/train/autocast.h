// Runs operations in a lower precision where that is safe, as Python's torch.autocast does, for the length of
// a scope:
//
//   at::Tensor loss;
//   {
//     lockstep::Autocast guard(at::kCPU, at::kBFloat16);
//     loss = torch::mse_loss(model(inputs), labels);
//   }
//   loss.backward();
//
// For this thread alone. Scopes nest; an inner one with {.enabled = false} switches it off. Casts of weights
// are kept until the outermost scope ends, so a step of the optimizer belongs outside.
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace lockstep {

struct AutocastOptions {
  bool enabled = true;
  std::optional<bool> cache_enabled = {};  // unset: as it is outside
};

class Autocast {
 public:
  // dtype: kBFloat16 or kHalf; unset: LibTorch's own choice, bfloat16 on the CPU and float16 on CUDA.
  // ConfigError for another, or for a device that LibTorch has no autocast for.
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

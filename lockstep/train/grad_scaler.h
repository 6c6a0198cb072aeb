// Scales the loss so that small gradients do not underflow in float16, like torch.amp.GradScaler. A step with
// overflowed gradients is skipped and the scale is reduced; after many good steps it grows.
//
//   lockstep::GradScaler scaler;
//   ...
//   scaler.scale(loss).backward();
//   scaler.unscale_(optimizer);                       // only if gradients are read or clipped
//   lockstep::clip_grad_norm(model->parameters(), 1.0);
//   scaler.step(optimizer);
//   scaler.update();
//
// Incorrect use (unscale_ twice, step without scale) throws ConfigError. Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>
#include <lockstep/comm/group.h>

namespace torch::optim {
class Optimizer;
}

namespace lockstep {

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;
  bool enabled = true;  // false: scale() returns the loss unchanged and step() always steps
  // The ranks that skip a step together. Needed if each rank has different gradients; replicas that average
  // their gradients agree without it. Every rank must then call unscale_ or step equally often.
  std::optional<Group> group = {};
};

class GradScaler {
 public:
  explicit GradScaler(GradScalerOptions options = {});

  at::Tensor scale(const at::Tensor& loss);
  // Divides the gradients by the scale, in place. At most once between two updates; step() does it otherwise.
  void unscale_(torch::optim::Optimizer& optimizer);
  // Calls optimizer.step() unless a gradient is infinite or NaN on any rank. Returns true if it did. Waits
  // for the device.
  bool step(torch::optim::Optimizer& optimizer);
  // Call at the end of each iteration. new_scale, if given, replaces the computed scale.
  void update(std::optional<double> new_scale = {});

  double current_scale() const;  // 1 if disabled; waits for the device
  bool enabled() const { return options_.enabled; }

  // For checkpoints, between iterations. Keys as in Python; empty if disabled.
  std::map<std::string, double> state() const;
  void load_state(const std::map<std::string, double>& state);

 private:
  enum class Stage { ready, unscaled, stepped };
  struct PerOptimizer {
    Stage stage = Stage::ready;
    at::Tensor found_inf;
  };
  void need_scale(const char* what) const;

  GradScalerOptions options_;
  at::Tensor scale_, growth_tracker_;  // on the device of the first loss
  std::int64_t first_growth_ = 0;      // value of growth_tracker_ until the device is known
  std::map<const void*, PerOptimizer> optimizers_;
};

}  // namespace lockstep

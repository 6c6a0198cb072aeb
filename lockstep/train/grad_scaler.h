// Scales the loss so that small gradients do not vanish in float16, as torch.amp.GradScaler does: a step
// whose gradients overflowed is left out and the scale is lowered; after many good steps it grows.
//
//   lockstep::GradScaler scaler;
//   ...
//   scaler.scale(loss).backward();
//   scaler.unscale_(optimizer);                       // only where gradients are looked at or clipped
//   lockstep::clip_grad_norm(model->parameters(), 1.0);
//   scaler.step(optimizer);
//   scaler.update();
//
// Errors of use (unscale_ twice, step without scale) are ConfigErrors. Not for several threads at once.
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
  bool enabled = true;  // false: scale gives the loss back, step steps
  // The ranks that leave out a step together. Needed where each has gradients of its own; replicas that
  // average their gradients agree without it. Every rank then calls unscale_ or step equally often.
  std::optional<Group> group = {};
};

class GradScaler {
 public:
  explicit GradScaler(GradScalerOptions options = {});

  at::Tensor scale(const at::Tensor& loss);
  // Divides the gradients by the scale, in place. At most once between two updates; step does it otherwise.
  void unscale_(torch::optim::Optimizer& optimizer);
  // optimizer.step(), unless a gradient is infinite or NaN on any rank. Whether it was done. Waits for the
  // device.
  bool step(torch::optim::Optimizer& optimizer);
  // At the end of each iteration. A new scale replaces the one that would follow.
  void update(std::optional<double> new_scale = {});

  double current_scale() const;  // 1 where not enabled; waits for the device
  bool enabled() const { return options_.enabled; }

  // For checkpoints, between iterations. Python's names; empty where not enabled.
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
  std::int64_t first_growth_ = 0;      // the tracker's value until there is a device
  std::map<const void*, PerOptimizer> optimizers_;
};

}  // namespace lockstep

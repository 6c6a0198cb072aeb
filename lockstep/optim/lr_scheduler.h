// Learning-rate schedules that LibTorch lacks, with the values of torch.optim.lr_scheduler, for any of
// LibTorch's optimizers and ours.
//
//   lockstep::LinearLROptions warmup{.start_factor = 0.01, .total_iters = 100};
//   lockstep::CosineAnnealingLROptions decay{.T_max = 900};
//   lockstep::SequentialLR scheduler(optimizer, {warmup, decay}, {100});
//   for (...) { ...; optimizer.step(); scheduler.step(); }
//
// As in Python, making a scheduler sets the first learning rate and step() the next one. Each group's base is
// the learning rate that it has when the scheduler is made; so make it before a checkpoint is loaded, which
// brings both back. The optimizer must outlive it. (LibTorch's own StepLR sets nothing when it is made, and
// lags a step.) Throws ConfigError for options out of range.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <lockstep/optim/lr_schedule.h>
#include <torch/optim/schedulers/lr_scheduler.h>

namespace lockstep {

class LRScheduler : public torch::optim::LRScheduler {
 public:
  std::int64_t last_epoch() const {
    return static_cast<std::int64_t>(step_count_) - 1;
  }  // how often step() was called
  std::vector<double> last_lr() const { return get_current_lrs(); }  // one for each group

  // For checkpoints; the optimizer's learning rates are saved with the optimizer.
  virtual std::map<std::string, double> state() const;
  virtual void load_state(const std::map<std::string, double>& state);

 protected:
  explicit LRScheduler(torch::optim::Optimizer& optimizer);
  std::vector<double> base_lrs_;
};

// One schedule after another, each beginning where a milestone, a number of steps, is reached. One schedule
// more than milestones.
class SequentialLR : public LRScheduler {
 public:
  SequentialLR(torch::optim::Optimizer& optimizer, std::vector<LRSchedule> schedules,
               std::vector<std::int64_t> milestones);
  std::map<std::string, double> state() const override;
  void load_state(const std::map<std::string, double>& state) override;

 private:
  std::vector<double> get_lrs() override;
  std::vector<LRSchedule> schedules_;
  std::vector<std::int64_t> milestones_;
  std::int64_t step_in_schedule_ = 0;
};

class ConstantLR : public SequentialLR {
 public:
  explicit ConstantLR(torch::optim::Optimizer& optimizer, ConstantLROptions options = {})
      : SequentialLR(optimizer, {options}, {}) {}
};
class LinearLR : public SequentialLR {
 public:
  explicit LinearLR(torch::optim::Optimizer& optimizer, LinearLROptions options = {})
      : SequentialLR(optimizer, {options}, {}) {}
};
class CosineAnnealingLR : public SequentialLR {
 public:
  CosineAnnealingLR(torch::optim::Optimizer& optimizer, CosineAnnealingLROptions options)
      : SequentialLR(optimizer, {options}, {}) {}
};
class ExponentialLR : public SequentialLR {
 public:
  ExponentialLR(torch::optim::Optimizer& optimizer, ExponentialLROptions options)
      : SequentialLR(optimizer, {options}, {}) {}
};
class LambdaLR : public SequentialLR {
 public:
  LambdaLR(torch::optim::Optimizer& optimizer, LambdaLROptions options)
      : SequentialLR(optimizer, {std::move(options)}, {}) {}
};

// step() beyond total_steps is a ConfigError. With cycle_momentum, the default, the optimizer must have
// momentum or betas: Adam, AdamW, SGD and RMSprop, LibTorch's and ours.
class OneCycleLR : public LRScheduler {
 public:
  OneCycleLR(torch::optim::Optimizer& optimizer, OneCycleLROptions options);

 private:
  std::vector<double> get_lrs() override;
  void set_momentum(double momentum);
  torch::optim::Optimizer& optimizer_;
  OneCycleLROptions options_;
};

}  // namespace lockstep

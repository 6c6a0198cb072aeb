// Learning-rate schedulers that LibTorch lacks, with the values of torch.optim.lr_scheduler, for all
// optimizers of LibTorch and Lockstep.
//
//   lockstep::LinearLROptions warmup{.start_factor = 0.01, .total_iters = 100};
//   lockstep::CosineAnnealingLROptions decay{.T_max = 900};
//   lockstep::SequentialLR scheduler(optimizer, {warmup, decay}, {100});
//   for (...) { ...; optimizer.step(); scheduler.step(); }
//
// As in Python, constructing a scheduler sets the first learning rate, and step() sets the next one. A
// group's base learning rate is its current one when the scheduler is constructed, so construct it before
// loading a checkpoint, which restores both. The optimizer must outlive the scheduler. (LibTorch's own StepLR
// sets nothing on construction and lags one step behind.) Throws ConfigError for options out of range.
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
  }  // number of calls of step()
  std::vector<double> last_lr() const { return get_current_lrs(); }  // one per group

  // For checkpoints. The learning rates themselves are saved with the optimizer.
  virtual std::map<std::string, double> state() const;
  virtual void load_state(const std::map<std::string, double>& state);

 protected:
  explicit LRScheduler(torch::optim::Optimizer& optimizer);
  std::vector<double> base_lrs_;
};

// Runs schedules one after another. Each milestone is the step at which the next schedule begins, so there is
// one schedule more than milestones.
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

// step() beyond total_steps throws ConfigError. With cycle_momentum (the default), the optimizer must have
// momentum or betas: Adam, AdamW, SGD or RMSprop of LibTorch or Lockstep.
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

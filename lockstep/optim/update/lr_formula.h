// Values of learning-rate schedules, bit-identical to torch/optim/lr_scheduler.py.
#pragma once

#include <cstdint>

#include <lockstep/optim/lr_schedule.h>

namespace lockstep::detail {

// Throw ConfigError for options out of range.
void check(const LRSchedule& schedule);
void check(const OneCycleLROptions& options);

// first_lr: the first value. next_lr: the value of step 1, 2, ..., computed from the optimizer's current lr.
// closed_form_lr: the value without the current lr, for the first step of a schedule that follows another
// one.
double first_lr(const LRSchedule& schedule, double lr, double base_lr);
double next_lr(const LRSchedule& schedule, std::int64_t step, double lr, double base_lr);
double closed_form_lr(const LRSchedule& schedule, std::int64_t step, double base_lr);

struct OneCycleValue {
  double lr;
  double momentum;
};
OneCycleValue one_cycle(const OneCycleLROptions& options, std::int64_t step);

}  // namespace lockstep::detail

// The values of learning-rate schedules, as torch/optim/lr_scheduler.py works them out, to the bit.
#pragma once

#include <cstdint>

#include <lockstep/optim/lr_schedule.h>

namespace lockstep::detail {

// ConfigError for what is out of range.
void check(const LRSchedule& schedule);
void check(const OneCycleLROptions& options);

// The first value; the value of step 1, 2, ... after lr, which is
// what the optimizer has now; and, where a schedule begins after another one, the first value without lr.
double first_lr(const LRSchedule& schedule, double lr, double base_lr);
double next_lr(const LRSchedule& schedule, std::int64_t step, double lr, double base_lr);
double closed_form_lr(const LRSchedule& schedule, std::int64_t step, double base_lr);

struct OneCycleValue {
  double lr;
  double momentum;
};
OneCycleValue one_cycle(const OneCycleLROptions& options, std::int64_t step);

}  // namespace lockstep::detail

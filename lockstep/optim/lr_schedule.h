// Options of learning-rate schedules, with PyTorch's names and defaults: plain data for the schedulers of
// lr_scheduler.h. Does not use LibTorch.
#pragma once

#include <cstdint>
#include <functional>
#include <variant>

namespace lockstep {

// lr * factor for the first total_iters steps, then lr.
struct ConstantLROptions {
  double factor = 1.0 / 3;
  std::int64_t total_iters = 5;
};

// From lr * start_factor to lr * end_factor in total_iters steps: a warm-up, or a decay.
struct LinearLROptions {
  double start_factor = 1.0 / 3;
  double end_factor = 1.0;
  std::int64_t total_iters = 5;
};

// From lr to eta_min along half a cosine in T_max steps, and back up again.
struct CosineAnnealingLROptions {
  std::int64_t T_max;
  double eta_min = 0;
};

// lr * gamma^step.
struct ExponentialLROptions {
  double gamma;
};

// lr * lr_lambda(step). The function is not saved: pass the same one after loading.
struct LambdaLROptions {
  std::function<double(std::int64_t)> lr_lambda;
};

using LRSchedule = std::variant<ConstantLROptions, LinearLROptions, CosineAnnealingLROptions,
                                ExponentialLROptions, LambdaLROptions>;

enum class AnnealStrategy : std::uint8_t { cos, linear };

// Rises to max_lr in the first pct_start of total_steps, then falls far below the start, as in the paper
// "Super-Convergence". The momentum (beta1 of Adam) moves in the opposite direction.
struct OneCycleLROptions {
  double max_lr;
  std::int64_t total_steps;
  double pct_start = 0.3;
  AnnealStrategy anneal_strategy = AnnealStrategy::cos;
  bool cycle_momentum = true;
  double base_momentum = 0.85;
  double max_momentum = 0.95;
  double div_factor = 25;
  double final_div_factor = 1e4;
  bool three_phase = false;
};

}  // namespace lockstep

#include <lockstep/optim/update/lr_formula.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include <fmt/format.h>
#include <lockstep/base/error.h>

namespace lockstep::detail {
namespace {

using std::numbers::pi;

template <typename... Cases>
struct Visitor : Cases... {
  using Cases::operator()...;
};

double real(std::int64_t n) { return static_cast<double>(n); }

void check_iters(const char* what, std::int64_t value) {
  if (value < 1) throw ConfigError(fmt::format("{}: expected at least 1, got {}", what, value));
}
void check_range(const char* what, double value, bool allowed, const char* range) {
  if (!allowed) throw ConfigError(fmt::format("{}: expected {}, got {}", what, range, value));
}

double cosine_next(const CosineAnnealingLROptions& o, std::int64_t step, double lr, double base_lr) {
  const double t_max = real(o.T_max);
  if ((step - 1 - o.T_max) % (2 * o.T_max) == 0)  // the ratio below is 0 / 0 at the minimum
    return lr + (base_lr - o.eta_min) * (1 - std::cos(pi / t_max)) / 2;
  return (1 + std::cos(pi * real(step) / t_max)) / (1 + std::cos(pi * real(step - 1) / t_max)) *
             (lr - o.eta_min) +
         o.eta_min;
}

double annealed(AnnealStrategy strategy, double start, double end, double part) {
  if (strategy == AnnealStrategy::linear) return (end - start) * part + start;
  return end + (start - end) / 2.0 * (std::cos(pi * part) + 1);
}

}  // namespace

void check(const LRSchedule& schedule) {
  std::visit(Visitor{
                 [](const ConstantLROptions& o) {
                   check_range("factor", o.factor, o.factor >= 0 && o.factor <= 1, "0 to 1");
                   check_iters("total_iters", o.total_iters);
                 },
                 [](const LinearLROptions& o) {
                   check_range("start_factor", o.start_factor, o.start_factor > 0 && o.start_factor <= 1,
                               "a number above 0 and up to 1");
                   check_range("end_factor", o.end_factor, o.end_factor >= 0 && o.end_factor <= 1, "0 to 1");
                   check_iters("total_iters", o.total_iters);
                 },
                 [](const CosineAnnealingLROptions& o) { check_iters("T_max", o.T_max); },
                 [](const ExponentialLROptions& o) {
                   check_range("gamma", o.gamma, std::isfinite(o.gamma), "a number");
                 },
                 [](const LambdaLROptions& o) {
                   if (!o.lr_lambda) throw ConfigError("lr_lambda: expected a function, got an empty one");
                 },
             },
             schedule);
}

void check(const OneCycleLROptions& o) {
  check_iters("total_steps", o.total_steps);
  check_range("pct_start", o.pct_start, o.pct_start >= 0 && o.pct_start <= 1, "0 to 1");
  check_range("max_lr", o.max_lr, o.max_lr >= 0, "0 or more");
  check_range("div_factor", o.div_factor, o.div_factor > 0, "a number above 0");
  check_range("final_div_factor", o.final_div_factor, o.final_div_factor > 0, "a number above 0");
}

double first_lr(const LRSchedule& schedule, double lr, double base_lr) {
  return std::visit(Visitor{
                        [&](const ConstantLROptions& o) { return lr * o.factor; },
                        [&](const LinearLROptions& o) { return lr * o.start_factor; },
                        [&](const CosineAnnealingLROptions&) { return lr; },
                        [&](const ExponentialLROptions&) { return lr; },
                        [&](const LambdaLROptions& o) { return base_lr * o.lr_lambda(0); },
                    },
                    schedule);
}

double next_lr(const LRSchedule& schedule, std::int64_t step, double lr, double base_lr) {
  return std::visit(
      Visitor{
          [&](const ConstantLROptions& o) { return step == o.total_iters ? lr * (1.0 / o.factor) : lr; },
          [&](const LinearLROptions& o) {
            if (step > o.total_iters) return lr;
            const double slope = o.end_factor - o.start_factor;
            return lr * (1.0 + slope / (real(o.total_iters) * o.start_factor + real(step - 1) * slope));
          },
          [&](const CosineAnnealingLROptions& o) { return cosine_next(o, step, lr, base_lr); },
          [&](const ExponentialLROptions& o) { return lr * o.gamma; },
          [&](const LambdaLROptions& o) { return base_lr * o.lr_lambda(step); },
      },
      schedule);
}

double closed_form_lr(const LRSchedule& schedule, std::int64_t step, double base_lr) {
  return std::visit(
      Visitor{
          [&](const ConstantLROptions& o) {
            return base_lr * (o.factor + (step >= o.total_iters ? 1 : 0) * (1 - o.factor));
          },
          [&](const LinearLROptions& o) {
            return base_lr * (o.start_factor + (o.end_factor - o.start_factor) *
                                                   real(std::min(o.total_iters, step)) / real(o.total_iters));
          },
          [&](const CosineAnnealingLROptions& o) {
            return o.eta_min + (base_lr - o.eta_min) * (1 + std::cos(pi * real(step) / real(o.T_max))) / 2;
          },
          [&](const ExponentialLROptions& o) { return base_lr * std::pow(o.gamma, real(step)); },
          [&](const LambdaLROptions& o) { return base_lr * o.lr_lambda(step); },
      },
      schedule);
}

OneCycleValue one_cycle(const OneCycleLROptions& o, std::int64_t step) {
  const double initial_lr = o.max_lr / o.div_factor, min_lr = initial_lr / o.final_div_factor;
  const double total = real(o.total_steps);
  struct Phase {
    double end, start_lr, end_lr, start_momentum, end_momentum;
  };
  std::vector<Phase> phases = {
      {o.pct_start * total - 1, initial_lr, o.max_lr, o.max_momentum, o.base_momentum}};
  if (o.three_phase) {
    phases.push_back({2 * o.pct_start * total - 2, o.max_lr, initial_lr, o.base_momentum, o.max_momentum});
    phases.push_back({total - 1, initial_lr, min_lr, o.max_momentum, o.max_momentum});
  } else {
    phases.push_back({total - 1, o.max_lr, min_lr, o.base_momentum, o.max_momentum});
  }
  double begin = 0;
  std::size_t now = 0;
  while (now + 1 < phases.size() && real(step) > phases[now].end) begin = phases[now++].end;
  const auto& phase = phases[now];
  const double part = (real(step) - begin) / (phase.end - begin);
  return {annealed(o.anneal_strategy, phase.start_lr, phase.end_lr, part),
          annealed(o.anneal_strategy, phase.start_momentum, phase.end_momentum, part)};
}

}  // namespace lockstep::detail

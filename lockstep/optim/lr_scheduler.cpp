#include <lockstep/optim/lr_scheduler.h>

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/optim/update/lr_formula.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

namespace lockstep {
namespace {

std::int64_t whole(const std::map<std::string, double>& state, const std::string& name) {
  const auto found = state.find(name);
  if (found == state.end())
    throw ConfigError(
        fmt::format("LRScheduler::load_state: missing '{}'; the state is of a different scheduler", name));
  if (!(found->second >= 0 && found->second < 4e9) || found->second != std::floor(found->second))
    throw ConfigError(fmt::format("LRScheduler::load_state: invalid {} = {}", name, found->second));
  return static_cast<std::int64_t>(found->second);
}

std::string base_name(std::size_t group) { return fmt::format("base_lr.{}", group); }

template <typename Options>
bool set_beta1(torch::optim::OptimizerOptions& options, double momentum) {
  auto* own = dynamic_cast<Options*>(&options);
  if (own != nullptr) own->betas({momentum, std::get<1>(own->betas())});
  return own != nullptr;
}

template <typename Options>
bool set_plain_momentum(torch::optim::OptimizerOptions& options, double momentum) {
  auto* own = dynamic_cast<Options*>(&options);
  if (own != nullptr) own->momentum(momentum);
  return own != nullptr;
}

}  // namespace

LRScheduler::LRScheduler(torch::optim::Optimizer& optimizer) : torch::optim::LRScheduler(optimizer) {
  base_lrs_ = get_current_lrs();
}

std::map<std::string, double> LRScheduler::state() const {
  std::map<std::string, double> state = {{"last_epoch", static_cast<double>(last_epoch())}};
  for (std::size_t g = 0; g < base_lrs_.size(); ++g) state[base_name(g)] = base_lrs_[g];
  return state;
}

void LRScheduler::load_state(const std::map<std::string, double>& state) {
  const auto last_epoch = whole(state, "last_epoch");
  std::vector<double> bases;
  for (std::size_t g = 0; g < base_lrs_.size(); ++g) {
    const auto found = state.find(base_name(g));
    if (found == state.end() || state.contains(base_name(base_lrs_.size())))
      throw ConfigError(
          fmt::format("LRScheduler::load_state: expected {} parameter groups, got {}", base_lrs_.size(),
                      std::count_if(state.begin(), state.end(),
                                    [](const auto& each) { return each.first.starts_with("base_lr."); })));
    bases.push_back(found->second);
  }
  base_lrs_ = std::move(bases);
  step_count_ = static_cast<unsigned>(last_epoch) + 1;
}

SequentialLR::SequentialLR(torch::optim::Optimizer& optimizer, std::vector<LRSchedule> schedules,
                           std::vector<std::int64_t> milestones)
    : LRScheduler(optimizer), schedules_(std::move(schedules)), milestones_(std::move(milestones)) {
  if (schedules_.empty() || milestones_.size() + 1 != schedules_.size())
    throw ConfigError(
        fmt::format("SequentialLR: expected one schedule more than milestones, got {} schedules and {} "
                    "milestones",
                    schedules_.size(), milestones_.size()));
  if (!std::is_sorted(milestones_.begin(), milestones_.end()) || (!milestones_.empty() && milestones_[0] < 0))
    throw ConfigError("SequentialLR: milestones: expected step numbers of at least 0 in increasing order");
  for (const auto& schedule : schedules_) detail::check(schedule);
  step();
}

std::vector<double> SequentialLR::get_lrs() {
  const auto step = static_cast<std::int64_t>(step_count_);
  const auto reached = std::upper_bound(milestones_.begin(), milestones_.end(), step) - milestones_.begin();
  const auto& schedule = schedules_[static_cast<std::size_t>(reached)];
  const bool begins = step > 0 && reached > 0 && milestones_[static_cast<std::size_t>(reached) - 1] == step;
  step_in_schedule_ = step == 0 || begins ? 0 : step_in_schedule_ + 1;
  auto lrs = get_current_lrs();
  for (std::size_t g = 0; g < lrs.size(); ++g) {
    const double base = g < base_lrs_.size() ? base_lrs_[g] : lrs[g];
    if (step == 0)
      lrs[g] = detail::first_lr(schedule, lrs[g], base);
    else if (begins)
      lrs[g] = detail::closed_form_lr(schedule, 0, base);
    else
      lrs[g] = detail::next_lr(schedule, step_in_schedule_, lrs[g], base);
  }
  return lrs;
}

std::map<std::string, double> SequentialLR::state() const {
  auto state = LRScheduler::state();
  state["step_in_schedule"] = static_cast<double>(step_in_schedule_);
  return state;
}

void SequentialLR::load_state(const std::map<std::string, double>& state) {
  const auto step_in_schedule = whole(state, "step_in_schedule");
  LRScheduler::load_state(state);
  step_in_schedule_ = step_in_schedule;
}

OneCycleLR::OneCycleLR(torch::optim::Optimizer& optimizer, OneCycleLROptions options)
    : LRScheduler(optimizer), optimizer_(optimizer), options_(options) {
  detail::check(options_);
  step();
}

std::vector<double> OneCycleLR::get_lrs() {
  const auto step = static_cast<std::int64_t>(step_count_);
  if (step > options_.total_steps)
    throw ConfigError(
        fmt::format("OneCycleLR: step {} is beyond total_steps ({})", step, options_.total_steps));
  const auto value = detail::one_cycle(options_, step);
  if (options_.cycle_momentum) set_momentum(value.momentum);
  return std::vector<double>(optimizer_.param_groups().size(), value.lr);
}

void OneCycleLR::set_momentum(double momentum) {
  for (auto& group : optimizer_.param_groups()) {
    auto& options = group.options();
    if (!set_beta1<torch::optim::AdamOptions>(options, momentum) &&
        !set_beta1<torch::optim::AdamWOptions>(options, momentum) &&
        !set_plain_momentum<torch::optim::SGDOptions>(options, momentum) &&
        !set_plain_momentum<torch::optim::RMSpropOptions>(options, momentum))
      throw ConfigError("OneCycleLR: cycle_momentum needs an optimizer with momentum or betas");
  }
}

}  // namespace lockstep

// One step of Adam or AdamW. Internal, because it includes LibTorch's heavy headers.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/ostream.h>
#include <lockstep/kernels/kernels.h>
#include <lockstep/modules/detail/unready_gradient.h>
#include <lockstep/optim/adam.h>
#include <lockstep/optim/detail/adam_launch.h>
#include <lockstep/optim/detail/cpu_update.h>
#include <lockstep/optim/detail/cuda_graph.h>
#include <lockstep/optim/detail/group_options.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

namespace lockstep::detail {

// Adam and AdamW differ only in their types and in where the weight decay is applied.
using FusedAdam = void (*)(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                           at::TensorList, double, double, double, double, double, bool, bool,
                           const std::optional<at::Tensor>&, const std::optional<at::Tensor>&);
struct AdamKind {
  using Base = torch::optim::AdamOptions;
  using State = ParamState<torch::optim::AdamParamState>;
  using Given = AdamOptions;
  static constexpr const char* name = "Adam";
  static constexpr bool decoupled = false;
  static constexpr FusedAdam fused = at::_fused_adam_;
};
struct AdamWKind {
  using Base = torch::optim::AdamWOptions;
  using State = ParamState<torch::optim::AdamWParamState>;
  using Given = AdamWOptions;
  static constexpr const char* name = "AdamW";
  static constexpr bool decoupled = true;
  static constexpr FusedAdam fused = at::_fused_adamw_;
};

template <typename Kind>
using AdamGroupOptions = ParamGroupOptions<typename Kind::Base>;

template <typename Kind>
AdamSettings settings_of(const AdamGroupOptions<Kind>& options) {
  const auto [beta1, beta2] = options.betas();
  return {options.lr(),           beta1,           beta2,           options.eps(),
          options.weight_decay(), Kind::decoupled, options.maximize};
}

struct Moments {
  at::Tensor exp_avg, exp_avg_sq, max_exp_avg_sq;  // max_exp_avg_sq is defined only with amsgrad
};

// The operations of _single_tensor_adam in torch/optim/adam.py, in the same order.
void adam_by_operations(at::Tensor parameter, at::Tensor gradient, Moments moments, const AdamScalars& s);
AdamSlice slice_of(const at::Tensor& parameter, const at::Tensor& gradient, const Moments& moments,
                   const AdamFactors& factors);

// One step of one optimizer. Updates that can run together are collected; the others run at once.
template <typename Kind>
class AdamStep {
 public:
  AdamStep(torch::optim::Optimizer& optimizer, AdamOnDevice& on_device)
      : optimizer_(optimizer), on_device_(on_device) {}

  void run() {
    for (const auto& group : optimizer_.param_groups())  // before anything changes
      for (const auto& parameter : group.params())
        if (const auto& gradient = parameter.grad(); gradient.defined()) {
          require_ready(gradient);
          if (gradient.is_sparse())
            throw ConfigError(fmt::format("{} does not support sparse gradients; use SGD", Kind::name));
        }
    check_capture();
    make_state();
    slices().clear();
    auto state = states().begin();
    for (std::size_t g = 0; g < optimizer_.param_groups().size(); ++g) {
      auto& group = optimizer_.param_groups()[g];
      const auto& options = own_options<typename Kind::Base>(group, optimizer_.defaults());
      const auto settings = settings_of<Kind>(options);
      last_step_ = 0;
      for (auto& parameter : group.params())
        if (parameter.grad().defined()) update(g, parameter, parameter.grad(), **state++, options, settings);
      run_fused(options);
    }
    launches_.run();
    finish();
    for (auto [launched, parameter] : launched_) note_written(*launched, parameter);
    for (auto* each : states())  // last, so that a failed step is not counted
      if (!each->device_step.defined()) each->step(each->step() + 1);
  }

 private:
  using State = typename Kind::State;
  struct Fused {
    std::vector<at::Tensor> parameters, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps;
    std::int64_t last_step = 0;
  };
  using Written = std::vector<std::pair<State*, at::Tensor>>;
  // Limit on float32 copies of gradients held until cpu_update runs, in bytes.
  static constexpr std::size_t kHeld = 64 << 20;

  // Kept between steps so that small models do not allocate in each one.
  static std::vector<AdamSlice>& slices() {
    thread_local std::vector<AdamSlice> kept;
    return kept;
  }
  // States of the parameters with a gradient, in order.
  static std::vector<State*>& states() {
    thread_local std::vector<State*> kept;
    return kept;
  }

  // Rejects what cannot be captured, or not correctly, before anything changes.
  void check_capture() {
    std::optional<at::Device> asked;
    for (auto& group : optimizer_.param_groups()) {
      const auto& options = own_options<typename Kind::Base>(group, optimizer_.defaults());
      for (const auto& parameter : group.params()) {
        if (!parameter.is_cuda()) continue;
        if (options.capturable) check_capturable(parameter, options);
        if (asked != parameter.device()) captured_ = capturing(*(asked = parameter.device()));
        if (!captured_) continue;
        if (!options.capturable)
          throw ConfigError(
              fmt::format("{} in a CUDA graph would repeat this step's count and lr: set .capturable = true",
                          Kind::name));
        if (parameter.grad().defined() && !has_all_state(parameter, options))
          throw ConfigError(
              "a capturable optimizer was captured before its first step; run one step before you capture");
      }
    }
  }

  // State created during a capture would be created again by every replay.
  bool has_all_state(const at::Tensor& parameter, const AdamGroupOptions<Kind>& options) {
    const auto found = optimizer_.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer_.state().end()) return false;
    auto& state = own_state<State>(found->second);
    return state.device_step.defined() && state.exp_avg().scalar_type() == at::kFloat &&
           (!options.amsgrad() || state.max_exp_avg_sq().defined()) &&
           (!has_master(parameter) || state.master.defined());
  }

  static void check_capturable(const at::Tensor& parameter, const AdamGroupOptions<Kind>& options) {
    const bool number =
        parameter.scalar_type() == at::kFloat || (options.master_weights && has_master(parameter));
    if (!number || !parameter.is_non_overlapping_and_dense())
      throw ConfigError(fmt::format(
          "{} with capturable: expected dense float32 parameters, or bfloat16 and float16 ones with "
          "master_weights, got {}{}",
          Kind::name, fmt::streamed(parameter.scalar_type()),
          parameter.is_non_overlapping_and_dense() ? "" : " that is not dense"));
    if (!kernels::available())
      throw ConfigError(
          fmt::format("{} with capturable needs Lockstep's CUDA kernels, which this build does not have; "
                      "build it with nvcc",
                      Kind::name));
  }

  // Runs before anything changes, because allocation may fail.
  void make_state() {
    states().clear();
    for (auto& group : optimizer_.param_groups()) {
      const auto& options = own_options<typename Kind::Base>(group, optimizer_.defaults());
      for (const auto& parameter : group.params())
        if (parameter.grad().defined()) states().push_back(&state_of(parameter, options));
    }
  }

  State& state_of(const at::Tensor& parameter, const AdamGroupOptions<Kind>& options) {
    auto& state = own_state<State>(optimizer_.state()[parameter.unsafeGetTensorImpl()]);
    if (options.master_weights && has_master(parameter))
      follow(state, parameter);
    else
      state.master.reset();
    const auto& target = state.master.defined() ? state.master : parameter;
    fit(state.exp_avg(), target);
    fit(state.exp_avg_sq(), target);
    if (options.amsgrad()) fit(state.max_exp_avg_sq(), target);
    if (!options.capturable || !parameter.is_cuda()) {
      if (state.device_step.defined()) {  // no longer capturable
        state.count_steps();
        state.device_step.reset();
      }
    } else if (!state.device_step.defined() || state.device_step.device() != parameter.device()) {
      state.device_step = at::full({}, state.step(), at::TensorOptions(at::kLong).device(parameter.device()));
    }
    return state;
  }

  void update(std::size_t group, const at::Tensor& parameter, at::Tensor gradient, State& state,
              const AdamGroupOptions<Kind>& options, const AdamSettings& settings) {
    const bool mastered = state.master.defined();
    const at::Tensor& target = mastered ? state.master : parameter;
    Moments moments{state.exp_avg(), state.exp_avg_sq(), {}};
    if (options.amsgrad()) moments.max_exp_avg_sq = state.max_exp_avg_sq();
    if (state.device_step.defined()) {
      on_device_.put(group, parameter.device(), settings);
      launches_.add_capturable(row_of(parameter, gradient, state, moments), options.maximize,
                               on_device_.find(group, parameter.device()));
      launched_.emplace_back(&state, parameter);
      return;
    }
    const auto step = state.step() + 1;
    const bool fused = options.implementation == Implementation::fused;
    if (fused && mastered && AdamLaunches::takes(parameter)) {
      work_out(step, settings);
      launches_.add(row_of(parameter, gradient, state, moments), options.maximize, factors_);
      launched_.emplace_back(&state, parameter);
      return;
    }
    if (mastered) {
      gradient = gradient.to(at::kFloat);
      rounded_.emplace_back(&state, parameter);
    }
    if (fused && fusable(target, gradient, moments.exp_avg)) return gather(target, gradient, step, moments);
    work_out(step, settings);
    const auto& most = options.amsgrad() ? moments.max_exp_avg_sq : moments.exp_avg;
    if (rows_alike(target, {&gradient, &moments.exp_avg, &moments.exp_avg_sq, &most}) &&
        adam_sweep_is_exact()) {
      slices().push_back(slice_of(target, gradient, moments, factors_));
      if (mastered) hold(gradient);
    } else {
      adam_by_operations(target, gradient, moments, scalars_);
    }
  }

  void work_out(std::int64_t step, const AdamSettings& settings) {
    if (step == last_step_) return;
    last_step_ = step;
    scalars_ = adam_scalars(settings, step);
    factors_ = rounded(scalars_);
  }

  AdamRow row_of(const at::Tensor& parameter, const at::Tensor& gradient, State& state,
                 const Moments& moments) {
    // The kernel ignores strides, so copy state that was loaded with other ones.
    auto alike = [&](const at::Tensor& tensor) {
      if (!tensor.defined() || tensor.strides() == parameter.strides()) return tensor;
      return at::empty_like(parameter, tensor.options(), at::MemoryFormat::Preserve).copy_(tensor);
    };
    state.exp_avg(alike(moments.exp_avg));
    state.exp_avg_sq(alike(moments.exp_avg_sq));
    if (moments.max_exp_avg_sq.defined()) state.max_exp_avg_sq(alike(moments.max_exp_avg_sq));
    state.master = alike(state.master);
    return {.parameter = parameter,
            .gradient = gradient,
            .master = state.master.defined() ? state.master : parameter,
            .exp_avg = state.exp_avg(),
            .exp_avg_sq = state.exp_avg_sq(),
            .max_exp_avg_sq = moments.max_exp_avg_sq.defined() ? state.max_exp_avg_sq() : at::Tensor(),
            .device_step = state.device_step};
  }

  // LibTorch's fused kernels ignore strides as well.
  static bool fusable(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& moment) {
    return parameter.is_floating_point() && parameter.is_non_overlapping_and_dense() &&
           gradient.strides() == parameter.strides() && moment.strides() == parameter.strides() &&
           gradient.scalar_type() == parameter.scalar_type() && !gradient.is_neg();
  }

  void gather(const at::Tensor& parameter, const at::Tensor& gradient, std::int64_t step,
              const Moments& moments) {
    auto& fused = fused_[{parameter.device(), parameter.scalar_type()}];
    fused.parameters.push_back(parameter);
    fused.gradients.push_back(gradient);
    fused.exp_avgs.push_back(moments.exp_avg);
    fused.exp_avg_sqs.push_back(moments.exp_avg_sq);
    if (moments.max_exp_avg_sq.defined()) fused.max_exp_avg_sqs.push_back(moments.max_exp_avg_sq);
    // Parameters with equal step counts share one tensor: the kernels only read it.
    if (step != fused.last_step) {
      fused.last_step = step;
      fused.steps.push_back(
          at::full({}, static_cast<double>(step), at::TensorOptions(at::kFloat).device(parameter.device())));
    } else {
      fused.steps.push_back(fused.steps.back());
    }
  }

  void run_fused(const AdamGroupOptions<Kind>& options) {
    const auto [beta1, beta2] = options.betas();
    for (auto& [kind, f] : fused_)
      Kind::fused(f.parameters, f.gradients, f.exp_avgs, f.exp_avg_sqs, f.max_exp_avg_sqs, f.steps,
                  options.lr(), beta1, beta2, options.weight_decay(), options.eps(), options.amsgrad(),
                  options.maximize, {}, {});
    fused_.clear();
  }

  void hold(at::Tensor gradient) {
    held_bytes_ += gradient.nbytes();
    held_.push_back(std::move(gradient));
    if (held_bytes_ > kHeld && fused_.empty()) finish();
  }

  // Runs the collected CPU updates, then rounds masters to their parameters.
  void finish() {
    cpu_update(slices());
    slices().clear();
    held_.clear();
    held_bytes_ = 0;
    round_masters(rounded_);
  }

  torch::optim::Optimizer& optimizer_;
  AdamOnDevice& on_device_;
  std::int64_t last_step_ = 0;
  AdamScalars scalars_{};
  AdamFactors factors_{};
  std::map<FusedKind, Fused, FusedKindLess> fused_;
  AdamLaunches launches_;
  Written rounded_, launched_;    // masters still to be rounded; parameters that the kernel writes
  std::vector<at::Tensor> held_;  // gradients that slices refer to
  std::size_t held_bytes_ = 0;
  bool captured_ = false;
};

}  // namespace lockstep::detail

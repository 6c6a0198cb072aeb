#include <lockstep/train/adam.h>

#include <cstdint>
#include <map>

#include <ATen/ATen.h>
#include <fmt/ostream.h>
#include <lockstep/train/adam_launch.h>
#include <lockstep/train/cuda_graph.h>
#include <lockstep/train/group_options.h>
#include <lockstep/train/step_memory.h>
#include <lockstep/train/step_watch.h>
#include <lockstep/train/sweep.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

namespace lockstep {
namespace detail {
namespace {

// Adam and AdamW share all but their types and where the weight decay goes.
using FusedAdam = void (*)(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                           at::TensorList, double, double, double, double, double, bool, bool,
                           const std::optional<at::Tensor>&, const std::optional<at::Tensor>&);
struct AdamKind {
  using Base = torch::optim::AdamOptions;
  using State = OwnState<torch::optim::AdamParamState>;
  using Given = AdamOptions;
  static constexpr const char* name = "Adam";
  static constexpr bool decoupled = false;
  static constexpr FusedAdam fused = at::_fused_adam_;
};
struct AdamWKind {
  using Base = torch::optim::AdamWOptions;
  using State = OwnState<torch::optim::AdamWParamState>;
  using Given = AdamWOptions;
  static constexpr const char* name = "AdamW";
  static constexpr bool decoupled = true;
  static constexpr FusedAdam fused = at::_fused_adamw_;
};

template <typename Kind>
using Options = GroupOptions<typename Kind::Base>;

template <typename Kind>
std::unique_ptr<Options<Kind>> group_options(const typename Kind::Given& given) {
  auto options = std::make_unique<Options<Kind>>(given.lr);
  options->betas({given.betas.first, given.betas.second});
  options->eps(given.eps);
  options->weight_decay(given.weight_decay);
  options->amsgrad(given.amsgrad);
  options->maximize = given.maximize;
  options->implementation = given.implementation;
  options->master_weights = given.master_weights;
  options->capturable = given.capturable;
  return options;
}

template <typename Kind>
typename Kind::Given given_options(const Options<Kind>& options) {
  return {.lr = options.lr(),
          .betas = {std::get<0>(options.betas()), std::get<1>(options.betas())},
          .eps = options.eps(),
          .weight_decay = options.weight_decay(),
          .amsgrad = options.amsgrad(),
          .maximize = options.maximize,
          .master_weights = options.master_weights,
          .capturable = options.capturable,
          .implementation = options.implementation};
}

template <typename Kind>
void check(const Options<Kind>& options) {
  check_at_least_zero("lr", options.lr());
  check_at_least_zero("eps", options.eps());
  check_at_least_zero("weight_decay", options.weight_decay());
  const auto [beta1, beta2] = options.betas();
  for (const double beta : {beta1, beta2})
    if (!(beta >= 0 && beta < 1))
      throw ConfigError(fmt::format("betas are {} and {}: from 0 to less than 1 is allowed", beta1, beta2));
}

template <typename Kind>
AdamSettings settings_of(const Options<Kind>& options) {
  const auto [beta1, beta2] = options.betas();
  return {options.lr(),           beta1,           beta2,           options.eps(),
          options.weight_decay(), Kind::decoupled, options.maximize};
}

struct Moments {
  at::Tensor exp_avg, exp_avg_sq, max_exp_avg_sq;  // the last one defined with amsgrad
};

// What _single_tensor_adam of torch/optim/adam.py does, in its order.
void adam_by_operations(at::Tensor parameter, at::Tensor gradient, Moments moments, const AdamScalars& s) {
  if (s.maximize) gradient = -gradient;
  if (s.shrink != 1) parameter.mul_(as_in_python(s.shrink));
  if (s.l2 != 0) gradient = gradient.add(parameter, s.l2);
  if (parameter.is_complex()) {
    for (auto* tensor :
         {&gradient, &parameter, &moments.exp_avg, &moments.exp_avg_sq, &moments.max_exp_avg_sq})
      if (tensor->defined()) *tensor = at::view_as_real(*tensor);
  }
  moments.exp_avg.lerp_(gradient, s.first_weight);
  moments.exp_avg_sq.mul_(as_in_python(s.second_keep)).addcmul_(gradient, gradient, s.second_weight);
  auto& second = moments.max_exp_avg_sq.defined() ? moments.max_exp_avg_sq : moments.exp_avg_sq;
  if (moments.max_exp_avg_sq.defined()) at::maximum_out(second, second, moments.exp_avg_sq);
  const auto divisor = second.sqrt().div_(s.root_divisor).add_(s.eps);
  parameter.addcdiv_(moments.exp_avg, divisor, s.step_size);
}

AdamSlice slice_of(const at::Tensor& parameter, const at::Tensor& gradient, const Moments& moments,
                   const AdamFactors& factors) {
  const auto& most = moments.max_exp_avg_sq;
  return {{.parameter = parameter.mutable_data_ptr<float>(),
           .gradient = gradient.const_data_ptr<float>(),
           .exp_avg = moments.exp_avg.mutable_data_ptr<float>(),
           .exp_avg_sq = moments.exp_avg_sq.mutable_data_ptr<float>(),
           .max_exp_avg_sq = most.defined() ? most.mutable_data_ptr<float>() : nullptr,
           .count = static_cast<std::size_t>(parameter.numel())},
          factors};
}

}  // namespace

bool adam_sweep_is_exact() {
  static const bool exact = [] {
    at::NoGradGuard no_grad;
    // Sizes: tails of vectors of any width, and enough for a difference that one number in a thousand shows.
    std::uint32_t seed = 1;
    for (const std::int64_t count : {1, 2, 3, 5, 7, 9, 15, 17, 31, 33, 8201})
      for (const bool l2 : {false, true})
        for (const double beta1 : {0.9, 0.3}) {
          const AdamSettings settings{1e-2, beta1, 0.99, 1e-8, 0.1, !l2, l2};
          at::Tensor parameters[2], first[2], second[2], most[2];
          for (int way : {0, 1}) {
            parameters[way] = probe_numbers(count, seed, 1);
            for (auto* zeros : {&first[way], &second[way], &most[way]}) *zeros = at::zeros({count});
          }
          for (std::int64_t step = 1; step <= 3; ++step) {
            const auto gradient = probe_numbers(count, ++seed, 1e-2f);
            const auto scalars = adam_scalars(settings, step);
            auto moments = [&](int way) {
              return Moments{first[way], second[way], l2 ? most[way] : at::Tensor()};
            };
            adam_by_operations(parameters[0], gradient, moments(0), scalars);
            const AdamSlice slices[] = {slice_of(parameters[1], gradient, moments(1), rounded(scalars))};
            sweep(slices);
          }
          for (const auto& pair : {parameters, first, second, most})
            if (!same_bits(pair[0], pair[1])) return false;
        }
    return true;
  }();
  return exact;
}

namespace {

// One step of one optimizer: what can be swept or launched together is gathered, the rest is done at once.
template <typename Kind>
class Step {
 public:
  Step(torch::optim::Optimizer& optimizer, AdamOnDevice& on_device)
      : optimizer_(optimizer), on_device_(on_device) {}

  void run() {
    for (const auto& group : optimizer_.param_groups())  // before anything changes
      for (const auto& parameter : group.params())
        if (parameter.grad().defined() && parameter.grad().is_sparse())
          throw ConfigError(fmt::format("{} does not take sparse gradients: SGD does", Kind::name));
    check_capture();
    slices().clear();
    for (std::size_t g = 0; g < optimizer_.param_groups().size(); ++g) {
      auto& group = optimizer_.param_groups()[g];
      const auto& options = own_options<typename Kind::Base>(group, optimizer_.defaults());
      const auto settings = settings_of<Kind>(options);
      last_step_ = 0;
      launches_.begin(options.maximize);
      for (auto& parameter : group.params())
        if (parameter.grad().defined()) update(g, parameter, parameter.grad(), options, settings);
      run_fused(options);
      launches_.run(g, on_device_);
    }
    finish();
    for (auto [state, parameter] : launched_) note_written(*state, parameter);
  }

 private:
  using State = typename Kind::State;
  struct Fused {
    std::vector<at::Tensor> parameters, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps;
    std::int64_t last_step = 0;
  };
  using Written = std::vector<std::pair<State*, at::Tensor>>;
  // Gradients in float32 that wait for the sweep: no more than this, in bytes.
  static constexpr std::size_t kHeld = 64 << 20;

  // Kept between steps, so that small models do not pay for memory.
  static std::vector<AdamSlice>& slices() {
    thread_local std::vector<AdamSlice> kept;
    return kept;
  }

  // What cannot be captured, or not rightly, is refused before anything changes.
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
          throw ConfigError(fmt::format(
              "{} is captured in a CUDA graph, which would repeat this step's count and lr: make it with "
              ".capturable = true",
              Kind::name));
        if (parameter.grad().defined() && !has_all_state(parameter, options))
          throw ConfigError(
              "a capturable optimizer was captured before its first step: run a step, then capture one");
      }
    }
  }

  // State that is made in a capture would be made anew by every replay.
  bool has_all_state(const at::Tensor& parameter, const Options<Kind>& options) {
    const auto found = optimizer_.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer_.state().end()) return false;
    auto& state = own_state<State>(found->second);
    return state.device_step.defined() && state.exp_avg().scalar_type() == at::kFloat &&
           (!options.amsgrad() || state.max_exp_avg_sq().defined()) &&
           (!has_master(parameter) || state.master.defined());
  }

  static void check_capturable(const at::Tensor& parameter, const Options<Kind>& options) {
    const bool number =
        parameter.scalar_type() == at::kFloat || (options.master_weights && has_master(parameter));
    if (!number || !parameter.is_non_overlapping_and_dense())
      throw ConfigError(fmt::format(
          "{} with capturable was given a parameter of {}{}: float32 without holes is allowed, bfloat16 and "
          "float16 with master_weights",
          Kind::name, fmt::streamed(parameter.scalar_type()),
          parameter.is_non_overlapping_and_dense() ? "" : " with holes"));
    if (!kernels::available())
      throw ConfigError(
          fmt::format("{} with capturable needs the library's CUDA kernels, and this build has none: build "
                      "it where there is nvcc",
                      Kind::name));
  }

  State& state_of(const at::Tensor& parameter, const Options<Kind>& options) {
    auto& state = own_state<State>(optimizer_.state()[parameter.unsafeGetTensorImpl()]);
    if (options.master_weights && has_master(parameter))
      follow(state, parameter);
    else
      state.master.reset();
    const auto& target = state.master.defined() ? state.master : parameter;
    fit(state.exp_avg(), target);
    fit(state.exp_avg_sq(), target);
    if (options.amsgrad()) fit(state.max_exp_avg_sq(), target);
    return state;
  }

  void update(std::size_t group, const at::Tensor& parameter, at::Tensor gradient,
              const Options<Kind>& options, const AdamSettings& settings) {
    auto& state = state_of(parameter, options);
    const bool mastered = state.master.defined();
    const at::Tensor& target = mastered ? state.master : parameter;
    Moments moments{state.exp_avg(), state.exp_avg_sq(), {}};
    if (options.amsgrad()) moments.max_exp_avg_sq = state.max_exp_avg_sq();
    if (options.capturable && parameter.is_cuda())
      return launch_capturable(group, parameter, gradient, state, moments, settings);
    if (state.device_step.defined()) {  // no longer capturable
      state.count_steps();
      state.device_step.reset();
    }
    state.step(state.step() + 1);
    const bool fused = options.implementation == Implementation::fused;
    if (fused && mastered && AdamLaunches::takes(parameter)) {
      work_out(state.step(), settings);
      launches_.add(row_of(parameter, gradient, state, moments), factors_);
      launched_.emplace_back(&state, parameter);
      return;
    }
    if (mastered) {
      gradient = gradient.to(at::kFloat);
      rounded_.emplace_back(&state, parameter);
    }
    if (fused && fusable(target, gradient, moments.exp_avg)) return gather(target, gradient, state, moments);
    work_out(state.step(), settings);
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
    // The kernel walks through memory, whatever the strides: state from elsewhere may have others.
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

  void launch_capturable(std::size_t group, const at::Tensor& parameter, const at::Tensor& gradient,
                         State& state, const Moments& moments, const AdamSettings& settings) {
    on_device_.put(group, parameter.device(), settings);
    if (!state.device_step.defined() || state.device_step.device() != parameter.device())
      state.device_step = at::full({}, state.step(), at::TensorOptions(at::kLong).device(parameter.device()));
    launches_.add_capturable(row_of(parameter, gradient, state, moments));
    launched_.emplace_back(&state, parameter);
  }

  // LibTorch's fused kernels walk through memory, whatever the strides.
  static bool fusable(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& moment) {
    return parameter.is_floating_point() && parameter.is_non_overlapping_and_dense() &&
           gradient.strides() == parameter.strides() && moment.strides() == parameter.strides() &&
           gradient.scalar_type() == parameter.scalar_type() && !gradient.is_neg();
  }

  void gather(const at::Tensor& parameter, const at::Tensor& gradient, const State& state,
              const Moments& moments) {
    auto& fused = fused_[{parameter.device(), parameter.scalar_type()}];
    fused.parameters.push_back(parameter);
    fused.gradients.push_back(gradient);
    fused.exp_avgs.push_back(moments.exp_avg);
    fused.exp_avg_sqs.push_back(moments.exp_avg_sq);
    if (moments.max_exp_avg_sq.defined()) fused.max_exp_avg_sqs.push_back(moments.max_exp_avg_sq);
    // One tensor for all parameters that are as far: they are read alone.
    if (state.step() != fused.last_step) {
      fused.last_step = state.step();
      fused.steps.push_back(at::full({}, static_cast<double>(state.step()),
                                     at::TensorOptions(at::kFloat).device(parameter.device())));
    } else {
      fused.steps.push_back(fused.steps.back());
    }
  }

  void run_fused(const Options<Kind>& options) {
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

  // The sweep, and what then is rounded.
  void finish() {
    sweep(slices());
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
  Written rounded_, launched_;  // whose parameters follow their masters yet, and those that the kernel writes
  std::vector<at::Tensor> held_;  // gradients that slices point to
  std::size_t held_bytes_ = 0;
  bool captured_ = false;
};

template <typename Kind>
void put_options(torch::optim::Optimizer& optimizer, AdamOnDevice& on_device) {
  auto& groups = optimizer.param_groups();
  on_device.put_again([&](std::size_t g) {
    return settings_of<Kind>(own_options<typename Kind::Base>(groups.at(g), optimizer.defaults()));
  });
}

// What a StepGraph must know of an optimizer that a step ran.
template <typename Kind>
StepWatch::User watched(torch::optim::Optimizer& optimizer, const std::shared_ptr<AdamOnDevice>& on_device) {
  StepWatch::User user{.optimizer = &optimizer, .parameters = {}, .state = {}, .before_replay = {}};
  std::vector<std::pair<void*, const void*>>
      places;  // parameters, and which tensor is the first of their state
  for (const auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params()) {
      user.parameters.push_back(parameter);
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      auto& state = own_state<typename Kind::State>(found->second);
      for (const auto& tensor :
           {state.master, state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq(), state.device_step})
        if (tensor.defined()) user.state.push_back(tensor);
      places.emplace_back(found->first, state.exp_avg().unsafeGetTensorImpl());
    }
  user.before_replay = [&optimizer, on_device, places = std::move(places)] {
    for (const auto& [parameter, first] : places) {
      const auto found = optimizer.state().find(parameter);
      if (found == optimizer.state().end() ||
          own_state<typename Kind::State>(found->second).exp_avg().unsafeGetTensorImpl() != first)
        return false;
    }
    put_options<Kind>(optimizer, *on_device);
    return true;
  };
  return user;
}

template <typename Kind>
at::Tensor run_step(torch::optim::Optimizer& optimizer, std::shared_ptr<AdamOnDevice>& on_device,
                    const torch::optim::Optimizer::LossClosure& closure) {
  at::NoGradGuard no_grad;
  auto loss = loss_of(closure);
  const Span span(SpanKind::optimizer, "optimizer");
  if (on_device == nullptr) on_device = std::make_shared<AdamOnDevice>();
  Step<Kind>(optimizer, *on_device).run();
  if (auto* watch = StepWatch::current()) watch->saw(watched<Kind>(optimizer, on_device));
  tell_memory(optimizer, [](torch::optim::OptimizerParamState& each) {
    auto& state = static_cast<typename Kind::State&>(each);
    return bytes_if_defined(state.exp_avg()) + bytes_if_defined(state.exp_avg_sq()) +
           bytes_if_defined(state.max_exp_avg_sq()) + bytes_if_defined(state.master);
  });
  return loss;
}

template <typename Kind>
typename Kind::Given options_of(const torch::optim::Optimizer& optimizer, std::size_t group) {
  auto& groups = const_cast<torch::optim::Optimizer&>(optimizer).param_groups();
  if (group >= groups.size())
    throw ConfigError(fmt::format("options of group {}: there are {} groups", group, groups.size()));
  return given_options<Kind>(own_options<typename Kind::Base>(groups[group], optimizer.defaults()));
}

}  // namespace
}  // namespace detail

using detail::AdamKind;
using detail::AdamWKind;
using torch::optim::OptimizerParamGroup;

Adam::Adam(std::vector<at::Tensor> parameters, AdamOptions options)
    : Adam(std::vector{OptimizerParamGroup(std::move(parameters))}, options) {}

Adam::Adam(const std::vector<OptimizerParamGroup>& groups, AdamOptions options)
    : Optimizer(std::vector<OptimizerParamGroup>{}, detail::group_options<AdamKind>(options)) {
  detail::take_groups<AdamKind::Base>(*this, groups, detail::check<AdamKind>);
}

OptimizerParamGroup Adam::group(std::vector<at::Tensor> parameters, AdamOptions options) {
  return {std::move(parameters), detail::group_options<AdamKind>(options)};
}

AdamOptions Adam::options(std::size_t group) const { return detail::options_of<AdamKind>(*this, group); }
at::Tensor Adam::step(LossClosure closure) { return detail::run_step<AdamKind>(*this, on_device_, closure); }
at::Tensor Adam::master(const at::Tensor& parameter) const {
  return detail::find_master<AdamKind::State>(*this, parameter);
}
void Adam::sync_masters() { detail::sync_all_masters<AdamKind::State>(*this); }
void Adam::upload_options() {
  if (on_device_ != nullptr) detail::put_options<AdamKind>(*this, *on_device_);
}
void Adam::save(torch::serialize::OutputArchive& archive) const {
  detail::save_optimizer<AdamKind::State, AdamKind::Base>(archive, *this);
}
void Adam::load(torch::serialize::InputArchive& archive) {
  detail::load_optimizer<AdamKind::State, AdamKind::Base>(archive, *this);
}

AdamW::AdamW(std::vector<at::Tensor> parameters, AdamWOptions options)
    : AdamW(std::vector{OptimizerParamGroup(std::move(parameters))}, options) {}

AdamW::AdamW(const std::vector<OptimizerParamGroup>& groups, AdamWOptions options)
    : Optimizer(std::vector<OptimizerParamGroup>{}, detail::group_options<AdamWKind>(options)) {
  detail::take_groups<AdamWKind::Base>(*this, groups, detail::check<AdamWKind>);
}

OptimizerParamGroup AdamW::group(std::vector<at::Tensor> parameters, AdamWOptions options) {
  return {std::move(parameters), detail::group_options<AdamWKind>(options)};
}

AdamWOptions AdamW::options(std::size_t group) const { return detail::options_of<AdamWKind>(*this, group); }
at::Tensor AdamW::step(LossClosure closure) {
  return detail::run_step<AdamWKind>(*this, on_device_, closure);
}
at::Tensor AdamW::master(const at::Tensor& parameter) const {
  return detail::find_master<AdamWKind::State>(*this, parameter);
}
void AdamW::sync_masters() { detail::sync_all_masters<AdamWKind::State>(*this); }
void AdamW::upload_options() {
  if (on_device_ != nullptr) detail::put_options<AdamWKind>(*this, *on_device_);
}
void AdamW::save(torch::serialize::OutputArchive& archive) const {
  detail::save_optimizer<AdamWKind::State, AdamWKind::Base>(archive, *this);
}
void AdamW::load(torch::serialize::InputArchive& archive) {
  detail::load_optimizer<AdamWKind::State, AdamWKind::Base>(archive, *this);
}

}  // namespace lockstep

#include <lockstep/train/adam.h>

#include <cstdint>
#include <map>

#include <ATen/ATen.h>
#include <lockstep/train/group_options.h>
#include <lockstep/train/step_memory.h>
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
  using State = torch::optim::AdamParamState;
  using Given = AdamOptions;
  static constexpr const char* name = "Adam";
  static constexpr bool decoupled = false;
  static constexpr FusedAdam fused = at::_fused_adam_;
};
struct AdamWKind {
  using Base = torch::optim::AdamWOptions;
  using State = torch::optim::AdamWParamState;
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

// One step of one optimizer: what can be swept is gathered, the rest is done at once.
template <typename Kind>
class Step {
 public:
  explicit Step(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {}

  void run() {
    for (const auto& group : optimizer_.param_groups())  // before anything changes
      for (const auto& parameter : group.params())
        if (parameter.grad().defined() && parameter.grad().is_sparse())
          throw ConfigError(fmt::format("{} does not take sparse gradients: SGD does", Kind::name));
    slices().clear();
    for (auto& group : optimizer_.param_groups()) {
      const auto& options = own_options<typename Kind::Base>(group, optimizer_.defaults());
      const auto settings = settings_of<Kind>(options);
      last_step_ = 0;
      for (auto& parameter : group.params())
        if (parameter.grad().defined()) update(parameter, parameter.grad(), options, settings);
      run_fused(options);
    }
    sweep(slices());
  }

 private:
  using State = typename Kind::State;
  struct Fused {
    std::vector<at::Tensor> parameters, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps;
    std::int64_t last_step = 0;
  };

  // Kept between steps, so that small models do not pay for memory.
  static std::vector<AdamSlice>& slices() {
    thread_local std::vector<AdamSlice> kept;
    return kept;
  }

  State& state_of(const at::Tensor& parameter, bool amsgrad) {
    auto& slot = optimizer_.state()[parameter.unsafeGetTensorImpl()];
    if (slot == nullptr) {
      auto fresh = std::make_unique<State>();
      fresh->exp_avg(at::zeros_like(parameter, {}, at::MemoryFormat::Preserve));
      fresh->exp_avg_sq(at::zeros_like(parameter, {}, at::MemoryFormat::Preserve));
      slot = std::move(fresh);
    }
    auto& state = static_cast<State&>(*slot);
    if (amsgrad && !state.max_exp_avg_sq().defined())
      state.max_exp_avg_sq(at::zeros_like(parameter, {}, at::MemoryFormat::Preserve));
    return state;
  }

  void update(const at::Tensor& parameter, const at::Tensor& gradient, const Options<Kind>& options,
              const AdamSettings& settings) {
    auto& state = state_of(parameter, options.amsgrad());
    state.step(state.step() + 1);
    Moments moments{state.exp_avg(), state.exp_avg_sq(), {}};
    if (options.amsgrad()) moments.max_exp_avg_sq = state.max_exp_avg_sq();
    const auto& most = options.amsgrad() ? moments.max_exp_avg_sq : moments.exp_avg;
    const bool fused = options.implementation == Implementation::fused;
    if (fused && fusable(parameter, gradient, moments.exp_avg))
      return gather(parameter, gradient, state, moments);
    if (state.step() != last_step_) {
      last_step_ = state.step();
      scalars_ = adam_scalars(settings, last_step_);
      factors_ = rounded(scalars_);
    }
    if (rows_alike(parameter, {&gradient, &moments.exp_avg, &moments.exp_avg_sq, &most}) &&
        adam_sweep_is_exact())
      slices().push_back(slice_of(parameter, gradient, moments, factors_));
    else
      adam_by_operations(parameter, gradient, moments, scalars_);
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

  torch::optim::Optimizer& optimizer_;
  std::int64_t last_step_ = 0;
  AdamScalars scalars_{};
  AdamFactors factors_{};
  std::map<FusedKind, Fused, FusedKindLess> fused_;
};

template <typename Kind>
at::Tensor run_step(torch::optim::Optimizer& optimizer, const torch::optim::Optimizer::LossClosure& closure) {
  at::NoGradGuard no_grad;
  auto loss = loss_of(closure);
  const Span span(SpanKind::optimizer, "optimizer");
  Step<Kind>(optimizer).run();
  tell_memory(optimizer, [](torch::optim::OptimizerParamState& each) {
    auto& state = static_cast<typename Kind::State&>(each);
    return bytes_if_defined(state.exp_avg()) + bytes_if_defined(state.exp_avg_sq()) +
           bytes_if_defined(state.max_exp_avg_sq());
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
at::Tensor Adam::step(LossClosure closure) { return detail::run_step<AdamKind>(*this, closure); }
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
at::Tensor AdamW::step(LossClosure closure) { return detail::run_step<AdamWKind>(*this, closure); }
void AdamW::save(torch::serialize::OutputArchive& archive) const {
  detail::save_optimizer<AdamWKind::State, AdamWKind::Base>(archive, *this);
}
void AdamW::load(torch::serialize::InputArchive& archive) {
  detail::load_optimizer<AdamWKind::State, AdamWKind::Base>(archive, *this);
}

}  // namespace lockstep

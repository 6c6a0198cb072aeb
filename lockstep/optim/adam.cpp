#include <lockstep/optim/adam.h>

#include <array>
#include <cstdint>

#include <ATen/ATen.h>
#include <lockstep/optim/detail/adam_step.h>
#include <lockstep/optim/detail/graphed_optimizers.h>
#include <lockstep/optim/detail/step_memory.h>

namespace lockstep {
namespace detail {
namespace {

template <typename Kind>
std::unique_ptr<AdamGroupOptions<Kind>> group_options(const typename Kind::Given& given) {
  auto options = std::make_unique<AdamGroupOptions<Kind>>(given.lr);
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
typename Kind::Given given_options(const AdamGroupOptions<Kind>& options) {
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
void check(const AdamGroupOptions<Kind>& options) {
  check_at_least_zero("lr", options.lr());
  check_at_least_zero("eps", options.eps());
  check_at_least_zero("weight_decay", options.weight_decay());
  const auto [beta1, beta2] = options.betas();
  for (const double beta : {beta1, beta2})
    if (!(beta >= 0 && beta < 1))
      throw ConfigError(
          fmt::format("betas: expected values of at least 0 and below 1, got {} and {}", beta1, beta2));
}

}  // namespace

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

bool adam_sweep_is_exact() {
  static const bool exact = [] {
    at::NoGradGuard no_grad;
    // Sizes: remainders for any vector width, and enough elements to show a difference in one of a thousand.
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
            cpu_update(slices);
          }
          for (const auto& pair : {parameters, first, second, most})
            if (!same_bits(pair[0], pair[1])) return false;
        }
    return true;
  }();
  return exact;
}

namespace {

template <typename Kind>
void put_options(torch::optim::Optimizer& optimizer, AdamOnDevice& on_device) {
  auto& groups = optimizer.param_groups();
  on_device.put_again([&](std::size_t g) {
    return settings_of<Kind>(own_options<typename Kind::Base>(groups.at(g), optimizer.defaults()));
  });
}

template <typename State>
std::array<at::Tensor, 5> tensors_of(State& state) {
  return {state.master, state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq(), state.device_step};
}

// What a StepGraph needs to know about an optimizer that its step uses.
template <typename Kind>
GraphedOptimizers::User watched(torch::optim::Optimizer& optimizer,
                                const std::shared_ptr<AdamOnDevice>& on_device) {
  GraphedOptimizers::User user{.optimizer = &optimizer, .parameters = {}, .state = {}, .before_replay = {}};
  std::vector<std::pair<void*, std::array<at::Tensor, 5>>> places;  // each parameter with its state
  for (const auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params()) {
      user.parameters.push_back(parameter);
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      const auto tensors = tensors_of(own_state<typename Kind::State>(found->second));
      for (const auto& tensor : tensors)
        if (tensor.defined()) user.state.push_back(tensor);
      places.emplace_back(found->first, tensors);
    }
  user.before_replay = [&optimizer, on_device, places = std::move(places)] {
    for (const auto& [parameter, tensors] : places) {
      const auto found = optimizer.state().find(parameter);
      if (found == optimizer.state().end()) return false;
      const auto now = tensors_of(own_state<typename Kind::State>(found->second));
      for (std::size_t i = 0; i < now.size(); ++i)
        if (!now[i].is_same(tensors[i])) return false;
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
  AdamStep<Kind>(optimizer, *on_device).run();
  if (auto* watch = GraphedOptimizers::current()) watch->saw(watched<Kind>(optimizer, on_device));
  tell_memory(optimizer, [](torch::optim::OptimizerParamState& each) {
    auto& state = static_cast<typename BaseOf<typename Kind::State>::Type&>(each);
    return bytes_if_defined(state.exp_avg()) + bytes_if_defined(state.exp_avg_sq()) +
           bytes_if_defined(state.max_exp_avg_sq()) + master_bytes<typename Kind::State>(each);
  });
  return loss;
}

template <typename Kind>
typename Kind::Given options_of(const torch::optim::Optimizer& optimizer, std::size_t group) {
  auto& groups = const_cast<torch::optim::Optimizer&>(optimizer).param_groups();
  if (group >= groups.size())
    throw ConfigError(
        fmt::format("options: group {} is out of range; the optimizer has {} groups", group, groups.size()));
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

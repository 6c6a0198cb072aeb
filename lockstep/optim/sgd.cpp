#include <lockstep/optim/sgd.h>

#include <cstdint>
#include <map>

#include <ATen/ATen.h>
#include <lockstep/modules/detail/unready_gradient.h>
#include <lockstep/optim/detail/cpu_update.h>
#include <lockstep/optim/detail/cuda_graph.h>
#include <lockstep/optim/detail/group_options.h>
#include <lockstep/optim/detail/step_memory.h>
#include <torch/optim/sgd.h>

namespace lockstep {
namespace detail {
namespace {

using SgdBase = torch::optim::SGDOptions;
using SgdState = ParamState<torch::optim::SGDParamState>;
using SgdGroup = ParamGroupOptions<SgdBase>;

std::unique_ptr<SgdGroup> group_options(const SGDOptions& given) {
  auto options = std::make_unique<SgdGroup>(given.lr);
  options->momentum(given.momentum);
  options->dampening(given.dampening);
  options->weight_decay(given.weight_decay);
  options->nesterov(given.nesterov);
  options->maximize = given.maximize;
  options->implementation = given.implementation;
  options->master_weights = given.master_weights;
  return options;
}

void check_sgd(const SgdGroup& options) {
  check_at_least_zero("lr", options.lr());
  check_at_least_zero("momentum", options.momentum());
  check_at_least_zero("weight_decay", options.weight_decay());
  if (options.nesterov() && (options.momentum() <= 0 || options.dampening() != 0))
    throw ConfigError(fmt::format("nesterov needs momentum above 0 and dampening 0, got {} and {}",
                                  options.momentum(), options.dampening()));
}

// The operations of _single_tensor_sgd in torch/optim/sgd.py, in the same order. The buffer is undefined
// without momentum.
void sgd_by_operations(const at::Tensor& parameter, at::Tensor gradient, at::Tensor& buffer,
                       const SgdGroup& options) {
  if (options.maximize) gradient = -gradient;
  if (options.weight_decay() != 0) gradient = gradient.add(parameter, options.weight_decay());
  if (options.momentum() != 0) {
    if (!buffer.defined())
      buffer = gradient.detach().clone();
    else
      buffer.mul_(as_in_python(options.momentum())).add_(gradient, 1 - options.dampening());
    gradient = options.nesterov() ? gradient.add(buffer, options.momentum()) : buffer;
  }
  parameter.add_(gradient, -options.lr());
}

SgdFactors factors_of(const SgdGroup& options) {
  return {.step_size = static_cast<float>(-options.lr()),
          .momentum = static_cast<float>(options.momentum()),
          .weight = static_cast<float>(1 - options.dampening()),
          .l2 = static_cast<float>(options.weight_decay()),
          .maximize = options.maximize,
          .nesterov = options.nesterov()};
}

SgdSlice slice_of(const at::Tensor& parameter, const at::Tensor& gradient, at::Tensor& buffer,
                  const SgdGroup& options, const SgdFactors& factors) {
  const bool first = options.momentum() != 0 && !buffer.defined();
  if (first) buffer = at::empty_like(parameter);
  return {{.parameter = parameter.mutable_data_ptr<float>(),
           .gradient = gradient.const_data_ptr<float>(),
           .momentum_buffer = options.momentum() != 0 ? buffer.mutable_data_ptr<float>() : nullptr,
           .first = first,
           .count = static_cast<std::size_t>(parameter.numel())},
          factors};
}

}  // namespace

bool sgd_sweep_is_exact() {
  static const bool exact = [] {
    at::NoGradGuard no_grad;
    std::uint32_t seed = 1;
    for (const std::int64_t count : {1, 2, 3, 5, 7, 9, 15, 17, 31, 33, 8201})
      for (const bool nesterov : {false, true}) {
        const auto options = group_options({.lr = 0.1,
                                            .momentum = 0.9,
                                            .dampening = nesterov ? 0 : 0.1,
                                            .weight_decay = 0.3,
                                            .nesterov = nesterov,
                                            .maximize = nesterov});
        at::Tensor parameters[2] = {probe_numbers(count, seed, 1), probe_numbers(count, seed, 1)}, buffers[2];
        for (int step = 0; step < 3; ++step) {
          const auto gradient = probe_numbers(count, ++seed, 1);
          sgd_by_operations(parameters[0], gradient, buffers[0], *options);
          const SgdSlice slices[] = {
              slice_of(parameters[1], gradient, buffers[1], *options, factors_of(*options))};
          cpu_update(slices);
        }
        if (!same_bits(parameters[0], parameters[1]) || !same_bits(buffers[0], buffers[1])) return false;
      }
    return true;
  }();
  return exact;
}

namespace {

class Step {
 public:
  explicit Step(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {}

  void run() {
    thread_local std::vector<SgdSlice> slices;  // kept between steps
    slices.clear();
    check();
    for (auto& group : optimizer_.param_groups()) {
      const auto& options = own_options<SgdBase>(group, optimizer_.defaults());
      const auto factors = factors_of(options);
      for (auto& parameter : group.params()) {
        auto gradient = parameter.grad();
        if (!gradient.defined()) continue;
        const bool mastered = options.master_weights && has_master(parameter);
        auto* state = mastered || options.momentum() != 0 ? &state_of(parameter, mastered) : nullptr;
        const auto& target = mastered ? state->master : parameter;
        const bool first = options.momentum() != 0 && !state->momentum_buffer().defined();
        at::Tensor none;
        auto& buffer = options.momentum() != 0 && !first ? state->momentum_buffer() : none;
        if (buffer.defined()) fit(buffer, target);
        if (mastered) {
          held_.push_back(gradient = gradient.to(at::kFloat));
          rounded_.emplace_back(state, parameter);
        }
        if (options.implementation == Implementation::fused && fusable(target, gradient, buffer))
          gather(target, gradient, buffer, options.momentum() != 0);
        else if (rows_alike(target, {&gradient, buffer.defined() ? &buffer : &gradient}) &&
                 sgd_sweep_is_exact())
          slices.push_back(slice_of(target, gradient, buffer, options, factors));
        else
          sgd_by_operations(target, gradient, buffer, options);
        if (first) made_.emplace_back(state, std::move(buffer));
      }
      run_fused(options);
    }
    cpu_update(slices);
    round_masters(rounded_);
    for (auto& [state, buffer] : made_) state->momentum_buffer(std::move(buffer));
  }

 private:
  struct Fused {
    std::vector<at::Tensor> parameters, gradients, buffers;
  };

  // Runs before anything changes.
  void check() {
    std::optional<at::Device> asked;
    for (auto& group : optimizer_.param_groups()) {
      const auto& options = own_options<SgdBase>(group, optimizer_.defaults());
      for (const auto& parameter : group.params()) {
        if (!parameter.grad().defined()) continue;
        require_ready(parameter.grad());
        if (options.master_weights && has_master(parameter) && parameter.grad().layout() != at::kStrided)
          throw ConfigError("SGD with master_weights does not support sparse bfloat16 and float16 gradients");
        if (parameter.is_cuda() && asked != parameter.device() && capturing(*(asked = parameter.device())))
          throw ConfigError(
              "SGD in a CUDA graph would repeat this step's lr: use Adam or AdamW with .capturable = true");
      }
    }
  }

  SgdState& state_of(const at::Tensor& parameter, bool mastered) {
    auto& state = own_state<SgdState>(optimizer_.state()[parameter.unsafeGetTensorImpl()]);
    if (mastered)
      follow(state, parameter);
    else
      state.master.reset();
    return state;
  }

  static bool fusable(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& buffer) {
    return parameter.is_floating_point() && gradient.layout() == at::kStrided &&
           parameter.is_non_overlapping_and_dense() && gradient.strides() == parameter.strides() &&
           (!buffer.defined() || buffer.strides() == parameter.strides()) &&
           gradient.scalar_type() == parameter.scalar_type() && !gradient.is_neg();
  }

  void gather(const at::Tensor& parameter, const at::Tensor& gradient, at::Tensor& buffer, bool momentum) {
    const bool first = momentum && !buffer.defined();
    if (first) buffer = at::empty_like(parameter);
    auto& fused = (first ? first_ : later_)[{parameter.device(), parameter.scalar_type()}];
    fused.parameters.push_back(parameter);
    fused.gradients.push_back(gradient);
    if (momentum) fused.buffers.push_back(buffer);
  }

  void run_fused(const SgdGroup& options) {
    for (auto* calls : {&first_, &later_}) {
      for (auto& [kind, f] : *calls)
        at::_fused_sgd_(f.parameters, f.gradients, f.buffers, options.weight_decay(), options.momentum(),
                        options.lr(), options.dampening(), options.nesterov(), options.maximize,
                        /*is_first_step=*/calls == &first_);
      calls->clear();
    }
  }

  torch::optim::Optimizer& optimizer_;
  std::vector<std::pair<SgdState*, at::Tensor>> rounded_;  // masters still to be rounded
  std::vector<at::Tensor> held_;                           // gradients that slices refer to
  // Buffers created by this step, without a value until it ends; a failed step discards them.
  std::vector<std::pair<SgdState*, at::Tensor>> made_;
  std::map<FusedKind, Fused, FusedKindLess> first_,
      later_;  // first_: new buffers; later_: existing ones
};

}  // namespace
}  // namespace detail

using torch::optim::OptimizerParamGroup;

SGD::SGD(std::vector<at::Tensor> parameters, SGDOptions options)
    : SGD(std::vector{OptimizerParamGroup(std::move(parameters))}, options) {}

SGD::SGD(const std::vector<OptimizerParamGroup>& groups, SGDOptions options)
    : Optimizer(std::vector<OptimizerParamGroup>{}, detail::group_options(options)) {
  detail::take_groups<detail::SgdBase>(*this, groups, detail::check_sgd);
}

OptimizerParamGroup SGD::group(std::vector<at::Tensor> parameters, SGDOptions options) {
  return {std::move(parameters), detail::group_options(options)};
}

SGDOptions SGD::options(std::size_t group) const {
  auto& groups = const_cast<SGD*>(this)->param_groups();
  if (group >= groups.size())
    throw ConfigError(
        fmt::format("options: group {} is out of range; the optimizer has {} groups", group, groups.size()));
  const auto& options = detail::own_options<detail::SgdBase>(groups[group], defaults());
  return {.lr = options.lr(),
          .momentum = options.momentum(),
          .dampening = options.dampening(),
          .weight_decay = options.weight_decay(),
          .nesterov = options.nesterov(),
          .maximize = options.maximize,
          .master_weights = options.master_weights,
          .implementation = options.implementation};
}

at::Tensor SGD::step(LossClosure closure) {
  at::NoGradGuard no_grad;
  auto loss = detail::loss_of(closure);
  const detail::Span span(detail::SpanKind::optimizer, "optimizer");
  detail::Step(*this).run();
  detail::tell_memory(*this, [](torch::optim::OptimizerParamState& each) {
    auto& state = static_cast<torch::optim::SGDParamState&>(each);
    return detail::bytes_if_defined(state.momentum_buffer()) + detail::master_bytes<detail::SgdState>(each);
  });
  return loss;
}

at::Tensor SGD::master(const at::Tensor& parameter) const {
  return detail::find_master<detail::SgdState>(*this, parameter);
}
void SGD::sync_masters() { detail::sync_all_masters<detail::SgdState>(*this); }

void SGD::save(torch::serialize::OutputArchive& archive) const {
  detail::save_optimizer<detail::SgdState, detail::SgdBase>(archive, *this);
}
void SGD::load(torch::serialize::InputArchive& archive) {
  detail::load_optimizer<detail::SgdState, detail::SgdBase>(archive, *this);
}

}  // namespace lockstep

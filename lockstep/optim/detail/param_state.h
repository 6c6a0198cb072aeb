// Per-parameter state of Lockstep's optimizers: LibTorch's state, so that casts to it work, plus what it
// lacks.
#pragma once

#include <memory>
#include <typeinfo>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

namespace lockstep::detail {

// Base: torch::optim::AdamParamState, AdamWParamState or SGDParamState.
template <typename Base>
struct ParamState : Base {
  ParamState() = default;
  explicit ParamState(const Base& base) : Base(base) {}

  // The float32 copy that the parameter is rounded from. Undefined without master_weights.
  at::Tensor master;
  // Address and version of the parameter after the last step; any other write to it changes one of them.
  const void* written_at = nullptr;
  std::int64_t written_version = -1;
  // With capturable: the step count on the device. step() is then its value when it was last read.
  at::Tensor device_step;

  void count_steps() {
    if constexpr (requires(ParamState& s) { s.step(1); })
      if (device_step.defined()) this->step(device_step.template item<std::int64_t>());
  }

  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<ParamState>(*this);
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    Base::serialize(archive);
    c10::IValue value;
    if (archive.try_read("master_param", value)) master = value.toTensor();
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    Base::serialize(archive);
    if (master.defined()) archive.write("master_param", c10::IValue(master));
  }
};

template <typename Own>
struct BaseOf;
template <typename Base>
struct BaseOf<ParamState<Base>> {
  using Type = Base;
};

// Returns the state as ours. LibTorch's own state, if present, is replaced first.
template <typename Own>
Own& own_state(std::unique_ptr<torch::optim::OptimizerParamState>& slot) {
  if (slot == nullptr) slot = std::make_unique<Own>();
  if (typeid(*slot) != typeid(Own))
    slot = std::make_unique<Own>(dynamic_cast<const typename BaseOf<Own>::Type&>(*slot));
  return static_cast<Own&>(*slot);
}

template <typename Own>
std::size_t master_bytes(const torch::optim::OptimizerParamState& state) {
  const auto* own = dynamic_cast<const Own*>(&state);  // LibTorch's state has none
  return own != nullptr && own->master.defined() ? own->master.nbytes() : 0;
}

// True if the parameter gets a master when masters are enabled.
inline bool has_master(const at::Tensor& parameter) {
  return parameter.scalar_type() == at::kBFloat16 || parameter.scalar_type() == at::kHalf;
}

// Returns the master, created from the parameter if there is none. If the parameter was modified since the
// last step, elements that no longer equal their rounded master are copied to the master.
at::Tensor followed_master(const at::Tensor& master, const at::Tensor& parameter);

template <typename Own>
void follow(Own& state, const at::Tensor& parameter, bool whatever_is_known = false) {
  if (!state.master.defined() || whatever_is_known || state.written_at != parameter.const_data_ptr() ||
      state.written_version != static_cast<std::int64_t>(parameter._version()))
    state.master = followed_master(state.master, parameter);
}

template <typename Own>
void note_written(Own& state, const at::Tensor& parameter) {
  state.written_at = parameter.const_data_ptr();
  state.written_version = static_cast<std::int64_t>(parameter._version());
}

// Rounds masters into their parameters, and clears the list.
void copy_rounded(at::TensorList parameters, at::TensorList masters);
template <typename Own>
void round_masters(std::vector<std::pair<Own*, at::Tensor>>& written) {
  if (written.empty()) return;
  std::vector<at::Tensor> parameters, masters;
  for (const auto& [state, parameter] : written) {
    parameters.push_back(parameter.detach());
    masters.push_back(state->master);
  }
  copy_rounded(parameters, masters);
  for (auto& [state, parameter] : written) note_written(*state, parameter);
  written.clear();
}

template <typename Own>
at::Tensor find_master(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  if (found == optimizer.state().end()) return {};
  const auto* state = dynamic_cast<const Own*>(found->second.get());
  return state != nullptr ? state->master : at::Tensor();
}

template <typename Own>
void sync_all_masters(torch::optim::Optimizer& optimizer) {
  at::NoGradGuard no_grad;
  for (const auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params()) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      auto& state = own_state<Own>(found->second);
      if (!state.master.defined()) continue;
      follow(state, parameter, /*whatever_is_known=*/true);
      note_written(state, parameter);
    }
}

// Prepares a moment for `target`: creates zeros if there is none, converts one saved with another dtype or
// device.
void make_fit(at::Tensor& moment, const at::Tensor& target);
inline void fit(at::Tensor& moment, const at::Tensor& target) {
  if (!moment.defined() || moment.scalar_type() != target.scalar_type() || moment.device() != target.device())
    make_fit(moment, target);
}

}  // namespace lockstep::detail

// Options of a parameter group of Lockstep's optimizers: LibTorch's options, so that casts to them work, plus
// what those lack. Internal, because it includes LibTorch's heavy headers.
#pragma once

#include <set>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/optim/detail/param_state.h>
#include <lockstep/optim/optimizer.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

namespace lockstep::detail {

// How a group is updated. Not saved: it does not depend on the checkpoint.
struct UpdateMode {
  Implementation implementation = Implementation::single;
  bool master_weights = false;
  bool capturable = false;
};

// Base: torch::optim::AdamOptions, AdamWOptions or SGDOptions.
template <typename Base>
struct ParamGroupOptions : Base, UpdateMode {
  explicit ParamGroupOptions(double lr) : Base(lr) {}
  explicit ParamGroupOptions(const Base& base) : Base(base) {}

  bool maximize = false;

  std::unique_ptr<torch::optim::OptimizerOptions> clone() const override {
    return std::make_unique<ParamGroupOptions>(*this);
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    Base::serialize(archive);
    c10::IValue value;
    if (archive.try_read("maximize", value)) maximize = value.toBool();
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    Base::serialize(archive);
    archive.write("maximize", c10::IValue(maximize));
  }
};

// Returns the group's options as ours. LibTorch's own options are replaced first; what they lack is taken
// from the optimizer's defaults.
template <typename Base>
ParamGroupOptions<Base>& own_options(torch::optim::OptimizerParamGroup& group,
                                     const torch::optim::OptimizerOptions& defaults) {
  using Own = ParamGroupOptions<Base>;
  auto& options = group.options();
  if (auto* own = dynamic_cast<Own*>(&options)) return *own;
  const auto* base = dynamic_cast<const Base*>(&options);
  if (base == nullptr)
    throw ConfigError(
        "a parameter group has the options of a different optimizer; pass this optimizer's options");
  auto own = std::make_unique<Own>(*base);
  const auto& fallback = static_cast<const Own&>(defaults);
  own->maximize = fallback.maximize;
  static_cast<UpdateMode&>(*own) = fallback;
  auto& result = *own;
  group.set_options(std::move(own));
  return result;
}

// Adds the groups to the optimizer, for constructors. check(options) throws for options out of range.
template <typename Base, typename Check>
void take_groups(torch::optim::Optimizer& optimizer,
                 const std::vector<torch::optim::OptimizerParamGroup>& groups, Check check) {
  std::set<const void*> seen;
  for (const auto& group : groups) {
    for (const auto& parameter : group.params())
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second)
        throw ConfigError("a parameter was passed to the optimizer twice; list each one once, in one group");
    // LibTorch would silently use the defaults instead.
    if (group.has_options() && dynamic_cast<const Base*>(&group.options()) == nullptr)
      throw ConfigError(
          "a parameter group has the options of a different optimizer; pass this optimizer's options");
    optimizer.add_param_group(group);
    auto& taken = optimizer.param_groups().back();
    // LibTorch treats an option equal to its default as unset; ours are always set explicitly.
    if (group.has_options() && dynamic_cast<const ParamGroupOptions<Base>*>(&group.options()))
      taken.set_options(group.options().clone());
    check(own_options<Base>(taken, optimizer.defaults()));
  }
  if (seen.empty()) throw ConfigError("the optimizer has no parameters: expected at least one");
}

template <typename Base>
void take_later_groups(torch::optim::Optimizer& optimizer) {
  for (auto& group : optimizer.param_groups()) own_options<Base>(group, optimizer.defaults());
}

// State: a ParamState.
template <typename State, typename Base>
void save_optimizer(torch::serialize::OutputArchive& archive, const torch::optim::Optimizer& given) {
  auto& optimizer = const_cast<torch::optim::Optimizer&>(given);
  take_later_groups<Base>(optimizer);
  for (auto& [parameter, state] : optimizer.state()) own_state<State>(state).count_steps();
  torch::optim::serialize<State, ParamGroupOptions<Base>>(archive, optimizer);
}

template <typename State, typename Base>
void load_optimizer(torch::serialize::InputArchive& archive, torch::optim::Optimizer& optimizer) {
  take_later_groups<Base>(optimizer);
  std::vector<UpdateMode> manners;
  for (auto& group : optimizer.param_groups())
    manners.push_back(own_options<Base>(group, optimizer.defaults()));
  torch::optim::serialize<State, ParamGroupOptions<Base>>(archive, optimizer);
  for (std::size_t g = 0; g < manners.size(); ++g)
    static_cast<UpdateMode&>(own_options<Base>(optimizer.param_groups()[g], optimizer.defaults())) =
        manners[g];
}

inline void check_at_least_zero(const char* what, double value) {
  if (!(value >= 0)) throw ConfigError(fmt::format("{}: expected 0 or more, got {}", what, value));
}

inline at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure) {
  if (closure == nullptr) return {};
  at::AutoGradMode enable_grad(true);
  return closure();
}

// Gradients that one call of LibTorch's fused kernels can take: those of one device and dtype.
using FusedKind = std::pair<at::Device, at::ScalarType>;
struct FusedKindLess {
  bool operator()(const FusedKind& a, const FusedKind& b) const {
    return std::tuple(a.first.type(), a.first.index(), a.second) <
           std::tuple(b.first.type(), b.first.index(), b.second);
  }
};

}  // namespace lockstep::detail

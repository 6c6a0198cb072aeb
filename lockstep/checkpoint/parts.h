// Arguments of save and load: `.model = net, .optimizer = optimizer, .sampler = sampler`. Each part only
// refers to its object, which must outlive the call of save or load.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <lockstep/checkpoint/value.h>

namespace torch::nn {
class Module;
}
namespace torch::jit {
struct Module;
}
namespace torch::optim {
class Optimizer;
}

namespace lockstep {

// A module, module holder, pointer to a module, TorchScript module, or DistributedDataParallel of any of
// these.
class ModelPart {
 public:
  ModelPart() = default;
  ModelPart(torch::nn::Module& module) : module_(&module) {}
  ModelPart(const torch::jit::Module& script);
  template <typename Holder>
    requires requires(Holder& holder) { std::shared_ptr<torch::nn::Module>(holder.ptr()); }
  ModelPart(Holder& holder) : module_(holder.ptr().get()) {}
  template <typename Pointer>
    requires requires(Pointer& pointer) {
      { *pointer } -> std::convertible_to<torch::nn::Module&>;
    } && (!requires(Pointer& holder) { holder.ptr(); })
  ModelPart(Pointer&& pointer) : module_(&*pointer) {}

  torch::nn::Module* get() const { return module_; }

 private:
  std::shared_ptr<torch::nn::Module> owned_;  // wrapper of a TorchScript module
  torch::nn::Module* module_ = nullptr;
};

class OptimizerPart {
 public:
  OptimizerPart() = default;
  OptimizerPart(torch::optim::Optimizer& optimizer) : optimizer_(&optimizer) {}
  torch::optim::Optimizer* get() const { return optimizer_; }

 private:
  torch::optim::Optimizer* optimizer_ = nullptr;
};

// Any object with state(), which returns a map from names to numbers, and load_state(map): samplers,
// schedulers, GradScaler, or your own class.
class StatePart {
 public:
  StatePart() = default;
  template <typename T>
    requires requires(T& part) { part.load_state(part.state()); }
  StatePart(T& part) {
    save = [&part] {
      CheckpointValues values;
      for (const auto& [name, value] : part.state()) values[name] = value;
      return values;
    };
    load = [&part](const CheckpointValues& values) {
      decltype(part.state()) state;
      using Number = typename decltype(state)::mapped_type;
      for (const auto& [name, value] : values) state[name] = number<Number>(name, value);
      part.load_state(state);
    };
  }

  std::function<CheckpointValues()> save;
  std::function<void(const CheckpointValues&)> load;

 private:
  template <typename Number>
  static Number number(const std::string& name, const CheckpointValue& value) {
    if (const auto* whole = std::get_if<std::int64_t>(&value)) return static_cast<Number>(*whole);
    if constexpr (std::floating_point<Number>)
      if (const auto* real = std::get_if<double>(&value)) return static_cast<Number>(*real);
    not_a_number(name);
  }
  [[noreturn]] static void not_a_number(const std::string& name);
};

}  // namespace lockstep

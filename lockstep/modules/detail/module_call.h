// The kinds of model that a technique accepts, and how to call them: a module holder (torch::nn::Sequential,
// a TORCH_MODULE, a Unit), a shared_ptr to a module, a module object, an AnyModule, or a TorchScript module.
#pragma once

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <lockstep/modules/script_module.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>

namespace lockstep::detail {

template <typename M>
struct is_shared : std::false_type {};
template <typename T>
struct is_shared<std::shared_ptr<T>> : std::true_type {};

template <typename M>
concept module_object = std::derived_from<M, torch::nn::Module> && !std::is_const_v<M>;
template <typename M>
concept script_module = std::same_as<std::remove_cv_t<M>, torch::jit::Module>;
template <typename M>
concept any_module = std::same_as<std::remove_cv_t<M>, torch::nn::AnyModule>;

// The model as LibTorch's base class; null for an empty holder. A module object is not owned and must outlive
// the result.
template <typename M>
std::shared_ptr<torch::nn::Module> module_pointer(M& model) {
  if constexpr (module_object<M>)
    return {std::shared_ptr<torch::nn::Module>(), &model};
  else if constexpr (script_module<M>)
    return registered(model);
  else if constexpr (is_shared<M>::value)
    return model;
  else
    return model.is_empty() ? nullptr : model.ptr();
}

// The object whose forward is called.
template <typename M>
auto& callee(M& model) {
  if constexpr (module_object<M> || script_module<M> || any_module<M>)
    return model;
  else
    return *model;
}
template <typename M>
using Callee = std::remove_cvref_t<decltype(callee(std::declval<M&>()))>;

// True if a class has a member named forward of any kind. Overloads and templates have no address, but make
// the name ambiguous with that of a second base.
struct ForwardName {
  int forward;
};
template <typename T>
struct WithForwardName : T, ForwardName {};
template <typename T>
concept names_forward = std::is_final_v<T> || !requires { &WithForwardName<T>::forward; };

template <typename M, typename... Args>
concept forward_takes = requires(M& model, Args&&... args) {
  callee(model).forward(std::forward<Args>(args)...);
} || (script_module<M> && (std::constructible_from<c10::IValue, Args&&> && ...));

// Calls forward with the model's own arguments.
template <typename M, typename... Args>
decltype(auto) call_forward(M& model, Args&&... args) {
  // LibTorch deduces the result of a holder's call only if forward is not a template, but Sequential's is.
  if constexpr (requires { typename M::is_unit; }) {
    return model(std::forward<Args>(args)...);
  } else if constexpr (script_module<M> &&
                       !requires { callee(model).forward(std::forward<Args>(args)...); }) {
    std::vector<c10::IValue> values;
    values.reserve(sizeof...(Args));
    (values.emplace_back(std::forward<Args>(args)), ...);
    return model.forward(std::move(values));
  } else {
    return callee(model).forward(std::forward<Args>(args)...);
  }
}

}  // namespace lockstep::detail

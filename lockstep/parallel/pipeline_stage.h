// A piece of a model that a pipeline can place: a module, and its forward as a function from a flat list of
// tensors to a flat list of tensors.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <ranges>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <lockstep/modules/detail/tensors_in.h>
#include <torch/nn/module.h>

namespace lockstep {

using StageValues = std::vector<at::Tensor>;  // An undefined tensor stands for an empty optional.

namespace detail {

[[noreturn]] void refuse_stage_values(const char* what, std::size_t given, std::size_t taken);

// Appends a tensor, an optional tensor, or the elements of a pair, tuple, array or vector of these.
template <typename T>
void put_values(const T& value, StageValues& values) {
  if constexpr (std::is_convertible_v<const T&, const at::Tensor&>) {
    values.push_back(value);
  } else if constexpr (has_elements<T>) {
    std::apply([&](const auto&... each) { (put_values(each, values), ...); }, value);
  } else if constexpr (requires {
                         value.has_value();
                         *value;
                       }) {
    static_assert(std::is_convertible_v<decltype(*value), const at::Tensor&>,
                  "a stage may pass on an optional only if it holds a tensor");
    values.push_back(value.has_value() ? *value : at::Tensor());
  } else {
    static_assert(std::ranges::range<const T>,
                  "a stage may pass on tensors, and tuples, vectors and optionals of them");
    for (const auto& each : value) put_values(each, values);
  }
}

template <typename T>
T take_value(const StageValues& values, std::size_t& at);

template <typename Tuple, std::size_t... I>
Tuple take_elements(const StageValues& values, std::size_t& at, std::index_sequence<I...>) {
  // Braces evaluate from left to right.
  return Tuple{take_value<std::tuple_element_t<I, Tuple>>(values, at)...};
}

template <typename T>
T take_value(const StageValues& values, std::size_t& at) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    if (at >= values.size()) refuse_stage_values("a tensor", values.size(), at + 1);
    if (!values[at].defined()) refuse_stage_values("a tensor, not an empty optional", values.size(), at + 1);
    return values[at++];
  } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
    if (at >= values.size()) refuse_stage_values("an optional tensor", values.size(), at + 1);
    const auto& value = values[at++];
    return value.defined() ? T(value) : T();
  } else if constexpr (has_elements<T>) {
    return take_elements<T>(values, at, std::make_index_sequence<std::tuple_size_v<T>>());
  } else {
    static_assert(std::is_same_v<T, std::vector<at::Tensor>>,
                  "a stage may take tensors, optional tensors, tuples of them, and finally a vector of "
                  "tensors");
    T rest(values.begin() + static_cast<std::ptrdiff_t>(at), values.end());
    at = values.size();
    return rest;
  }
}

template <typename Args, typename Call>
StageValues call_stage(const StageValues& values, const Call& call) {
  std::size_t at = 0;
  auto args = take_value<Args>(values, at);
  if (at != values.size()) refuse_stage_values("fewer", values.size(), at);
  StageValues results;
  put_values(std::apply(call, std::move(args)), results);
  return results;
}

template <typename F>
struct ForwardOf;
template <typename R, typename C, typename... A>
struct ForwardOf<R (C::*)(A...)> {
  using Args = std::tuple<std::remove_cvref_t<A>...>;
};
template <typename R, typename C, typename... A>
struct ForwardOf<R (C::*)(A...) const> : ForwardOf<R (C::*)(A...)> {};

// The arguments of a forward that is overloaded or a template cannot be deduced: assume one tensor, as
// Sequential does.
template <typename Impl>
struct StageArgs {
  using type = std::tuple<at::Tensor>;
};
template <typename Impl>
  requires requires { &Impl::forward; }
struct StageArgs<Impl> {
  using type = typename ForwardOf<decltype(&Impl::forward)>::Args;
};

template <typename M>
struct ContainedIn {
  using type = typename M::ContainedType;
};
template <typename T>
struct ContainedIn<std::shared_ptr<T>> {
  using type = T;
};

}  // namespace detail

class PipelineStage {
 public:
  using Forward = std::function<StageValues(const StageValues&)>;

  // module: a module holder, a Unit, or a shared_ptr to a module. name: its name in Pipeline::module(), such
  // as "blocks.0". An empty name puts its children and parameters directly there: "tokens", not
  // "input.tokens". Without a name, the number of the piece is used.
  template <typename M>
    requires(!std::is_same_v<std::remove_cvref_t<M>, PipelineStage>)
  PipelineStage(M module, std::optional<std::string> name = {}) : name_(std::move(name)) {
    using Impl = typename detail::ContainedIn<M>::type;
    if constexpr (requires { module.ptr(); })
      module_ = module.is_empty() ? nullptr : module.ptr();
    else
      module_ = module;
    forward_ = [module = std::move(module)](const StageValues& values) mutable {
      return detail::call_stage<typename detail::StageArgs<Impl>::type>(values, [&](auto&&... args) {
        if constexpr (requires { typename M::is_unit; })
          return module(std::forward<decltype(args)>(args)...);
        else
          return module->forward(std::forward<decltype(args)>(args)...);
      });
    };
  }
  // For anything else: the module provides the parameters, forward does the work.
  PipelineStage(std::shared_ptr<torch::nn::Module> module, Forward forward,
                std::optional<std::string> name = {})
      : module_(std::move(module)), forward_(std::move(forward)), name_(std::move(name)) {}

  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  const std::optional<std::string>& name() const { return name_; }
  StageValues operator()(const StageValues& values) const { return forward_(values); }

 private:
  std::shared_ptr<torch::nn::Module> module_;
  Forward forward_;
  std::optional<std::string> name_;
};

// Makes a piece of each of the model's Units that `names` selects ('*' in "blocks.*" stands for any text
// without a dot). List the names in the order in which the model calls the Units; code between the calls is
// not run. Each Unit must take one tensor and return one. Throws ConfigError, with names, for a name that
// matches nothing, a module that is not a Unit, a module that is listed twice or is inside another, and
// weights outside all pieces.
std::vector<PipelineStage> stages_at(torch::nn::Module& model, const std::vector<std::string>& names);

}  // namespace lockstep

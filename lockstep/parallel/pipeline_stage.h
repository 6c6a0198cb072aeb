// A piece of a model that a pipeline can place: what a module's forward takes and gives, as a flat list of
// tensors.
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

using StageValues = std::vector<at::Tensor>;  // undefined: an optional that is empty

namespace detail {

[[noreturn]] void refuse_stage_values(const char* what, std::size_t given, std::size_t taken);

// A tensor, an optional tensor, a pair, tuple, array or vector of such, flat.
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
                  "an optional between stages is one of a tensor");
    values.push_back(value.has_value() ? *value : at::Tensor());
  } else {
    static_assert(std::ranges::range<const T>,
                  "between stages there are tensors, and tuples, vectors and optionals of them");
    for (const auto& each : value) put_values(each, values);
  }
}

template <typename T>
T take_value(const StageValues& values, std::size_t& at);

template <typename Tuple, std::size_t... I>
Tuple take_elements(const StageValues& values, std::size_t& at, std::index_sequence<I...>) {
  return Tuple{take_value<std::tuple_element_t<I, Tuple>>(values, at)...};  // braces: from left to right
}

template <typename T>
T take_value(const StageValues& values, std::size_t& at) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    if (at >= values.size()) refuse_stage_values("a tensor", values.size(), at + 1);
    if (!values[at].defined())
      refuse_stage_values("a tensor where an optional is empty", values.size(), at + 1);
    return values[at++];
  } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
    if (at >= values.size()) refuse_stage_values("an optional tensor", values.size(), at + 1);
    const auto& value = values[at++];
    return value.defined() ? T(value) : T();
  } else if constexpr (has_elements<T>) {
    return take_elements<T>(values, at, std::make_index_sequence<std::tuple_size_v<T>>());
  } else {
    static_assert(std::is_same_v<T, std::vector<at::Tensor>>,
                  "a stage takes tensors, optional tensors, tuples of them, and last a vector of tensors");
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

// A forward that is a template or has overloads cannot be asked: one tensor in, as with Sequential.
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

  // A module holder, a Unit, or a shared_ptr to a module. The name is that of the module in
  // Pipeline::module(), such as "blocks.0"; "": what it has stands there itself, as "tokens", not
  // "input.tokens"; none: its number.
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
  // Anything else: the module has the parameters, forward does the work.
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

// The Units of a model by their names ("blocks.*": '*' stands for any text without a dot), in the order in
// which the model calls them, one after the other: what lies between them is not called. Each takes a tensor
// and gives one. ConfigError, with names: what matches nothing, is no Unit, stands twice or in another, and
// weights in none.
std::vector<PipelineStage> stages_at(torch::nn::Module& model, const std::vector<std::string>& names);

}  // namespace lockstep

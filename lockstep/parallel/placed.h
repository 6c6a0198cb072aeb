// Placed: a module on a device of its own, for models whose parts live on several devices of one process.
//
//   lockstep::Placed part1(ModelPart1(), at::Device("cuda:0"));
//   lockstep::Placed part2(ModelPart2(), at::Device("cuda:1"));
//   auto output = part2(part1(inputs));   // inputs may be on any device; backward retraces the path
//
// Placed<M> behaves like M, from which it derives, except for its call: tensors in the arguments, including
// those in tuples, pairs, arrays, vectors, maps and optionals, are first moved to the device. A tensor that
// is already there is passed on unchanged. Copies to CUDA are asynchronous: do not overwrite a pinned CPU
// tensor before its copy has completed.
#pragma once

#include <cstddef>
#include <ranges>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <lockstep/modules/detail/tensors_in.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

namespace lockstep {
namespace detail {

// Moves the module. Returns the device, with an index if its type has one.
at::Device place(torch::nn::Module* module, at::Device device);
at::Tensor on_device(const at::Tensor& tensor, at::Device device);

template <typename T>
concept optional_value = requires(const T& value) {
  value.has_value();
  *value;
  typename T::value_type;
};

// Excludes types such as a path, which is a range of paths.
template <typename T>
concept range_of_others = std::ranges::range<const T> && !std::is_convertible_v<const T&, std::string_view> &&
                          !std::is_same_v<std::ranges::range_value_t<const T>, T>;

template <typename T>
consteval bool holds_tensors();
template <typename T, std::size_t... I>
consteval bool element_holds_tensors(std::index_sequence<I...>) {
  return (holds_tensors<std::remove_cvref_t<std::tuple_element_t<I, T>>>() || ...);
}
template <typename T>
consteval bool holds_tensors() {
  if constexpr (std::is_convertible_v<const T&, const at::Tensor&>)
    return true;
  else if constexpr (has_elements<T>)
    return element_holds_tensors<T>(std::make_index_sequence<std::tuple_size_v<T>>());
  else if constexpr (optional_value<T>)
    return holds_tensors<typename T::value_type>();
  else if constexpr (range_of_others<T>)
    return holds_tensors<std::ranges::range_value_t<const T>>();
  else
    return false;
}

// Returns the value with its tensors moved to the device.
template <typename T>
auto moved(const T& value, at::Device device) {
  if constexpr (std::is_convertible_v<const T&, const at::Tensor&>) {
    return on_device(value, device);
  } else if constexpr (!holds_tensors<T>()) {
    return value;
  } else if constexpr (has_elements<T>) {
    return std::apply([&](const auto&... each) { return T{moved(each, device)...}; }, value);
  } else if constexpr (optional_value<T>) {
    return value ? T(moved(*value, device)) : T();
  } else {
    // A list that owns nothing (at::TensorList) becomes a vector.
    using Element = std::ranges::range_value_t<const T>;
    constexpr bool owns = requires(T& list, const Element& element) { list.insert(list.end(), element); };
    std::conditional_t<owns, T, std::vector<Element>> result;
    for (const auto& each : value) result.insert(result.end(), moved<Element>(each, device));
    return result;
  }
}

// Passes on a value without tensors by reference, without a copy.
template <typename T>
decltype(auto) argument_on(T&& value, at::Device device) {
  if constexpr (holds_tensors<std::remove_cvref_t<T>>())
    return moved<std::remove_cvref_t<T>>(value, device);
  else
    return std::forward<T>(value);
}

}  // namespace detail

// M: a module holder (torch::nn::Sequential, a TORCH_MODULE, a Unit).
template <typename M>
class Placed : public M {
 public:
  Placed(std::nullptr_t) : M(nullptr) {}
  // Moves the module itself, not a copy; its parameters stay the same tensors. Throws ConfigError for an
  // empty holder, and for a device that does not exist, with a list of those that do.
  Placed(M module, at::Device device) : M(std::move(module)) {
    device_ = detail::place(this->is_empty() ? nullptr : this->get(), device);
  }

  template <typename... Args>
  decltype(auto) operator()(Args&&... args) {
    // LibTorch deduces the result of a holder's call only if forward is not a template, but Sequential's is.
    if constexpr (requires { typename M::is_unit; })
      return M::operator()(detail::argument_on(std::forward<Args>(args), device_)...);
    else
      return this->get()->forward(detail::argument_on(std::forward<Args>(args), device_)...);
  }
  template <typename... Args>
  decltype(auto) forward(Args&&... args) {
    return (*this)(std::forward<Args>(args)...);
  }

  at::Device device() const { return device_; }

 private:
  at::Device device_ = at::kCPU;
};

}  // namespace lockstep

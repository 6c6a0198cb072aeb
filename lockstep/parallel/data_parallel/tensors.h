// The tensors in a value: the value itself, or those in its tuples, pairs, arrays, vectors, maps and
// optionals, at any depth. Any other type is assumed to hold none.
//
//   TensorsIn<std::tuple<at::Tensor, int>>::any      true
//   TensorsIn<std::tuple<at::Tensor, int>>::only     false
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::detail {

// A value's tensors in order, and the sizes of its dynamically sized containers. Two values with equal shapes
// can exchange their tensors.
struct TensorsOf {
  std::vector<at::Tensor> tensors;
  std::vector<std::size_t> shape;
};

// list() appends a value's tensors. with() returns the value with its tensors replaced by those from `next`
// on.
template <typename T>
struct TensorsIn {
  static constexpr bool any = false, only = false;
  static void list(const T&, TensorsOf&) {}
  static const T& with(const T& value, const at::Tensor*&) { return value; }
};

template <>
struct TensorsIn<at::Tensor> {
  static constexpr bool any = true, only = true;
  static void list(const at::Tensor& value, TensorsOf& found) { found.tensors.push_back(value); }
  static at::Tensor with(const at::Tensor&, const at::Tensor*& next) { return *next++; }
};

template <typename T>
struct TensorsIn<std::optional<T>> {
  static constexpr bool any = TensorsIn<T>::any, only = TensorsIn<T>::only;
  static void list(const std::optional<T>& value, TensorsOf& found) {
    found.shape.push_back(value ? 1 : 0);
    if (value) TensorsIn<T>::list(*value, found);
  }
  static std::optional<T> with(const std::optional<T>& value, const at::Tensor*& next) {
    return value ? std::optional<T>(TensorsIn<T>::with(*value, next)) : std::nullopt;
  }
};

template <typename T>
struct TensorsIn<c10::ArrayRef<T>> {
  static constexpr bool any = TensorsIn<T>::any, only = false;
  static void list(c10::ArrayRef<T> value, TensorsOf& found) {
    found.shape.push_back(value.size());
    for (const auto& each : value) TensorsIn<T>::list(each, found);
  }
  static std::vector<T> with(c10::ArrayRef<T> value, const at::Tensor*& next) {
    std::vector<T> result;
    result.reserve(value.size());
    for (const auto& each : value) result.push_back(TensorsIn<T>::with(each, next));
    return result;
  }
};

template <typename T>
struct TensorsIn<std::vector<T>> {
  static constexpr bool any = TensorsIn<T>::any, only = TensorsIn<T>::only;
  static void list(const std::vector<T>& value, TensorsOf& found) {
    TensorsIn<c10::ArrayRef<T>>::list(value, found);
  }
  static std::vector<T> with(const std::vector<T>& value, const at::Tensor*& next) {
    return TensorsIn<c10::ArrayRef<T>>::with(value, next);
  }
};

template <>
struct TensorsIn<std::vector<bool>> {  // A bit set, not a vector.
  static constexpr bool any = false, only = false;
  static void list(const std::vector<bool>&, TensorsOf&) {}
  static const std::vector<bool>& with(const std::vector<bool>& value, const at::Tensor*&) { return value; }
};

template <typename K, typename V, typename... Rest>
struct TensorsIn<std::map<K, V, Rest...>> {
  using Map = std::map<K, V, Rest...>;
  static constexpr bool any = TensorsIn<V>::any, only = TensorsIn<V>::only;
  static void list(const Map& value, TensorsOf& found) {
    found.shape.push_back(value.size());
    for (const auto& [key, each] : value) {
      found.shape.push_back(std::hash<K>{}(key));
      TensorsIn<V>::list(each, found);
    }
  }
  static Map with(const Map& value, const at::Tensor*& next) {
    Map result;
    for (const auto& [key, each] : value)
      result.emplace_hint(result.end(), key, TensorsIn<V>::with(each, next));
    return result;
  }
};

// Two maps may have different orders, so it is supported as an argument but not as a result.
template <typename K, typename V, typename... Rest>
struct TensorsIn<std::unordered_map<K, V, Rest...>> {
  using Map = std::unordered_map<K, V, Rest...>;
  static constexpr bool any = TensorsIn<V>::any, only = false;
  static void list(const Map& value, TensorsOf& found) {
    for (const auto& [key, each] : value) TensorsIn<V>::list(each, found);
  }
  static Map with(const Map& value, const at::Tensor*& next) {
    Map result;
    for (const auto& [key, each] : value) result.emplace(key, TensorsIn<V>::with(each, next));
    return result;
  }
};

// Types with a fixed number of elements.
template <typename Product, typename... Ts>
struct TensorsInProduct {
  static constexpr bool any = (TensorsIn<Ts>::any || ...), only = (TensorsIn<Ts>::only && ...);
  static void list(const Product& value, TensorsOf& found) {
    std::apply([&](const Ts&... each) { (TensorsIn<Ts>::list(each, found), ...); }, value);
  }
  static Product with(const Product& value, const at::Tensor*& next) {
    // Braces, because their contents are evaluated in order.
    return std::apply([&](const Ts&... each) { return Product{TensorsIn<Ts>::with(each, next)...}; }, value);
  }
};

template <typename... Ts>
struct TensorsIn<std::tuple<Ts...>> : TensorsInProduct<std::tuple<Ts...>, Ts...> {};
template <typename A, typename B>
struct TensorsIn<std::pair<A, B>> : TensorsInProduct<std::pair<A, B>, A, B> {};

template <typename T, std::size_t N>
struct TensorsIn<std::array<T, N>> {
  static constexpr bool any = TensorsIn<T>::any, only = TensorsIn<T>::only;
  static void list(const std::array<T, N>& value, TensorsOf& found) {
    for (const auto& each : value) TensorsIn<T>::list(each, found);
  }
  static std::array<T, N> with(std::array<T, N> value, const at::Tensor*& next) {
    for (auto& each : value) each = TensorsIn<T>::with(each, next);
    return value;
  }
};

// An argument for one replica: a copy with the replica's tensors, or the caller's value if it contains none.
template <typename T>
decltype(auto) argument_with(T& value, const at::Tensor*& next) {
  using Tensors = TensorsIn<std::remove_const_t<T>>;
  if constexpr (Tensors::any)
    return Tensors::with(value, next);
  else
    return (value);
}
template <typename Arg>
using ArgumentWith = decltype(argument_with(std::declval<std::remove_reference_t<Arg>&>(),
                                            std::declval<const at::Tensor*&>()));

}  // namespace lockstep::detail

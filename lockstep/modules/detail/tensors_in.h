// Finds the tensors inside a value: a tensor, an optional, a pair, a tuple, an array, a range, any nesting of
// these, or a TorchScript value.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <ranges>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <lockstep/modules/script_module.h>

namespace lockstep::detail {

template <typename T>
concept has_elements = requires { std::tuple_size<std::remove_cvref_t<T>>::value; };

// Values of other types are assumed to contain no tensors.
template <typename T>
void collect_tensors(const T& value, std::vector<at::Tensor>& found) {
  if constexpr (std::is_same_v<T, c10::IValue>) {
    collect_tensors_of(value, found);
  } else if constexpr (std::is_convertible_v<const T&, const at::Tensor&>) {
    found.push_back(value);
  } else if constexpr (has_elements<T>) {
    std::apply([&](const auto&... each) { (collect_tensors(each, found), ...); }, value);
  } else if constexpr (std::ranges::range<const T> && !std::is_convertible_v<const T&, std::string_view>) {
    for (const auto& each : value) collect_tensors(each, found);
  } else if constexpr (requires {
                         value.has_value();
                         *value;
                       }) {
    if (value.has_value()) collect_tensors(*value, found);
  }
}

}  // namespace lockstep::detail

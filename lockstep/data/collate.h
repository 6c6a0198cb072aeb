// Combines samples into a batch, like torch.utils.data.default_collate:
//
//   at::Tensor                          a tensor with a leading batch dimension
//   integers, bool, float, double       a tensor of int64, bool, float32, float64
//   std::string                         std::vector<std::string>
//   std::pair, tuple, array, vector,    the same type, of batches
//     map, torch::data::Example
//   a struct of up to 8 members         the same struct if all members are tensors, else a std::tuple
//
// Any other type needs a collate function: any callable that takes std::vector<Sample> and returns the batch.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <lockstep/data/pass/fields.h>

namespace lockstep {

namespace detail {

at::Tensor stacked(std::vector<at::Tensor> tensors);
at::Tensor tensor_of(const void* values, std::size_t count, at::ScalarType type);
[[noreturn]] void refuse_lengths(std::size_t one, std::size_t other);

// Element type that a number of type T has in a batch.
template <typename T>
using number_t = std::conditional_t<std::is_same_v<T, bool>, std::uint8_t,
                                    std::conditional_t<std::is_integral_v<T>, std::int64_t, T>>;
template <typename T>
constexpr at::ScalarType number_type() {
  if constexpr (std::is_same_v<T, bool>)
    return at::kBool;
  else if constexpr (std::is_integral_v<T>)
    return at::kLong;
  else
    return std::is_same_v<T, float> ? at::kFloat : at::kDouble;
}

template <typename Sample>
auto collate(std::vector<Sample> samples);

// Collates each field separately, then rebuilds the sample's type from the results.
template <typename Sample, std::size_t... I>
auto collate_fields(std::vector<Sample>& samples, std::index_sequence<I...>) {
  const auto column = [&]<std::size_t K>(std::integral_constant<std::size_t, K>) {
    std::vector<std::remove_cvref_t<decltype(std::get<K>(fields_of(samples[0])))>> values;
    values.reserve(samples.size());
    for (auto& each : samples) values.push_back(std::move(std::get<K>(fields_of(each))));
    return collate(std::move(values));
  };
  return rebuilt<Sample>(column(std::integral_constant<std::size_t, I>())...);
}

template <typename Sample>
auto collate(std::vector<Sample> samples) {
  if constexpr (std::is_same_v<Sample, at::Tensor>) {
    return stacked(std::move(samples));
  } else if constexpr (std::is_arithmetic_v<Sample>) {
    static_assert(!std::is_same_v<Sample, long double>, "long double has no tensor type");
    const std::vector<number_t<Sample>> values(samples.begin(), samples.end());
    return tensor_of(values.data(), values.size(), number_type<Sample>());
  } else if constexpr (std::is_same_v<Sample, std::string>) {
    return samples;
  } else if constexpr (is_vector<Sample>) {
    std::vector<decltype(collate(std::declval<Sample>()))> batch;
    const auto length = samples.empty() ? 0 : samples[0].size();
    for (const auto& each : samples)
      if (each.size() != length) refuse_lengths(length, each.size());
    for (std::size_t k = 0; k < length; ++k) {
      Sample column;
      for (auto& each : samples) column.push_back(std::move(each[k]));
      batch.push_back(collate(std::move(column)));
    }
    return batch;
  } else if constexpr (is_map<Sample>) {
    using Value = typename Sample::mapped_type;
    std::map<typename Sample::key_type, decltype(collate(std::declval<std::vector<Value>>()))> batch;
    for (const auto& key : samples.empty() ? Sample() : Sample(samples[0])) {
      std::vector<Value> column;
      for (auto& each : samples) column.push_back(std::move(each.at(key.first)));
      batch.emplace(key.first, collate(std::move(column)));
    }
    return batch;
  } else {
    static_assert(
        has_fields<Sample>,
        "DataLoader: no default collation for this sample type (see lockstep/data/collate.h); pass a collate "
        "function");
    return collate_fields(samples, std::make_index_sequence<num_fields<Sample>>());
  }
}

}  // namespace detail

struct DefaultCollate {
  template <typename Sample>
  auto operator()(std::vector<Sample> samples) const {
    return detail::collate(std::move(samples));
  }
};

}  // namespace lockstep

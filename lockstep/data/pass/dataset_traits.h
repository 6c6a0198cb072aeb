// What the loader and the wrapping datasets require of a dataset. Internal.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace lockstep::detail {

// Datasets of torch::data: requested by lists of indices, or by number of samples (streams and stateful
// ones).
template <typename D>
concept torch_dataset = requires {
  typename D::BatchType;
  typename D::BatchRequestType;
};
template <typename D>
concept torch_stream = torch_dataset<D> && std::same_as<typename D::BatchRequestType, std::size_t>;

template <typename D>
concept indexed = requires(D& d, std::int64_t i) { d.get(i); };
template <typename D>
concept indexed_random = requires(D& d, std::int64_t i, at::Generator& g) { d.get(i, g); };
template <typename D>
concept batched = !torch_dataset<D> && requires(D& d, std::span<const std::int64_t> s) { d.get_batch(s); };
template <typename D>
concept single = indexed<D> || indexed_random<D>;
template <typename D>
concept dataset_type = torch_dataset<std::remove_const_t<D>> || single<D> || batched<D>;
template <typename D>
concept dataset = dataset_type<std::remove_reference_t<D>>;
// True unless the constructor's only argument is a Self, which means a copy.
template <typename Self, typename First, typename... Others>
concept no_copy = (sizeof...(Others) > 0) || !std::same_as<std::remove_cvref_t<First>, Self>;

// Number of samples; nullopt for an infinite stream.
template <typename D>
std::optional<std::int64_t> size_if_known(const D& d) {
  if constexpr (requires { d.size().has_value(); }) {
    const auto size = d.size();
    return size ? std::optional(static_cast<std::int64_t>(*size)) : std::nullopt;
  } else {
    return static_cast<std::int64_t>(d.size());
  }
}
std::int64_t known_size(std::optional<std::int64_t> size);  // throws ConfigError if it is not known
template <typename D>
std::int64_t size_of(const D& d) {
  return known_size(size_if_known(d));
}

// True if get() draws random numbers.
template <typename D>
bool uses_random(D& d) {
  if constexpr (requires { d.draws_random(); })
    return d.draws_random();
  else
    return indexed_random<D> && !indexed<D>;
}

template <typename D>
decltype(auto) sample_of(D& d, std::int64_t index, at::Generator& generator) {
  if constexpr (indexed_random<D>)
    return d.get(index, generator);
  else
    return d.get(index);
}
template <typename D>
using sample_t = std::remove_cvref_t<decltype(sample_of(std::declval<std::remove_reference_t<D>&>(), 0,
                                                        std::declval<at::Generator&>()))>;

// How a dataset is held: a handle is copied, a shared pointer shared, a temporary moved, anything else
// referenced.
template <typename D>
concept handle = requires { requires std::remove_cvref_t<D>::kHandle; };
template <typename D>
concept shared = requires {
  typename std::remove_cvref_t<D>::element_type;
} && std::same_as<std::remove_cvref_t<D>, std::shared_ptr<typename std::remove_cvref_t<D>::element_type>>;
template <typename D>
struct Held {
  using type = std::remove_reference_t<D>;
};
template <handle D>
struct Held<D> {
  using type = std::remove_cvref_t<D>;
};
template <typename D>
  requires torch_dataset<D>
struct Held<const D&> {  // their get_batch() is not const
  using type = D;
};
template <shared D>
struct Held<D> {
  using type = typename std::remove_cvref_t<D>::element_type;
};
template <typename D>
using held_t = typename Held<D>::type;

template <typename D>
std::shared_ptr<held_t<D>> hold(D&& dataset) {
  if constexpr (shared<D>)
    return std::forward<D>(dataset);
  else if constexpr (std::is_lvalue_reference_v<D> && !handle<D> &&
                     std::same_as<held_t<D>, std::remove_reference_t<D>>)
    return {std::shared_ptr<void>(), &dataset};  // owns nothing
  else
    return std::make_shared<held_t<D>>(std::forward<D>(dataset));
}

std::int64_t equal_rows(std::span<const at::Tensor> tensors);  // throws ConfigError if they differ
at::Tensor row(const at::Tensor& tensor, std::int64_t index);
at::Tensor rows(const at::Tensor& tensor, std::span<const std::int64_t> indices);

std::int64_t checked_size(std::int64_t size);
[[noreturn]] void refuse_index(std::int64_t index, std::int64_t size);
inline void check_index(std::int64_t index, std::int64_t size) {
  if (index < 0 || index >= size) [[unlikely]]
    refuse_index(index, size);
}

std::vector<std::vector<std::int64_t>> split(std::int64_t size, const std::vector<double>& parts,
                                             std::optional<at::Generator> generator);

}  // namespace lockstep::detail

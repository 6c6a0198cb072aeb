// Datasets built from other datasets.
//
//   auto [train, valid] = random_split(dataset, {0.9, 0.1});
//   Subset few(dataset, {3, 14, 15});
//   ConcatDataset both(few, valid);
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <lockstep/data/pass/dataset_traits.h>

namespace lockstep {

// Selected samples of another dataset.
template <typename Dataset>
class Subset {
 public:
  static constexpr bool kHandle = true;

  Subset(auto&& dataset, std::vector<std::int64_t> indices)
      : dataset_(detail::hold(std::forward<decltype(dataset)>(dataset))),
        indices_(std::make_shared<const std::vector<std::int64_t>>(std::move(indices))) {
    for (const auto each : *indices_) detail::check_index(each, detail::size_of(*dataset_));
  }

  std::int64_t size() const { return static_cast<std::int64_t>(indices_->size()); }
  const std::vector<std::int64_t>& indices() const { return *indices_; }
  bool draws_random() const { return detail::uses_random(*dataset_); }
  auto get(std::int64_t index, at::Generator generator = {}) const
    requires detail::single<Dataset>
  {
    return detail::sample_of(*dataset_, there(index), generator);
  }
  auto get_batch(std::span<const std::int64_t> indices) const
    requires detail::batched<Dataset>
  {
    std::vector<std::int64_t> mapped;
    mapped.reserve(indices.size());
    for (const auto each : indices) mapped.push_back(there(each));
    return dataset_->get_batch(mapped);
  }

 private:
  std::int64_t there(std::int64_t index) const {
    detail::check_index(index, size());
    return (*indices_)[static_cast<std::size_t>(index)];
  }

  std::shared_ptr<Dataset> dataset_;
  std::shared_ptr<const std::vector<std::int64_t>> indices_;
};
template <typename D>
Subset(D&&, std::vector<std::int64_t>) -> Subset<detail::held_t<D>>;

// Several datasets in sequence, with samples of one type.
template <typename Sample>
class ConcatDataset {
 public:
  static constexpr bool kHandle = true;

  // Excludes a single ConcatDataset, which is a copy.
  template <detail::dataset D, detail::dataset... Others>
    requires detail::no_copy<ConcatDataset, D, Others...>
  explicit ConcatDataset(D&& first, Others&&... others) {
    add(std::forward<D>(first));
    (add(std::forward<Others>(others)), ...);
  }
  template <detail::dataset D>
  explicit ConcatDataset(std::vector<D> datasets) {
    for (auto& each : datasets) add(std::move(each));
  }

  std::int64_t size() const { return ends_.empty() ? 0 : ends_.back(); }
  bool draws_random() const { return random_; }
  Sample get(std::int64_t index, at::Generator generator = {}) const {
    detail::check_index(index, size());
    const auto which = std::upper_bound(ends_.begin(), ends_.end(), index) - ends_.begin();
    return gets_[static_cast<std::size_t>(which)](index - (which == 0 ? 0 : ends_[which - 1]), generator);
  }

 private:
  void add(auto&& dataset) {
    auto held = detail::hold(std::forward<decltype(dataset)>(dataset));
    ends_.push_back(size() + detail::size_of(*held));
    random_ = random_ || detail::uses_random(*held);
    gets_.push_back([held](std::int64_t index, at::Generator& generator) -> Sample {
      return detail::sample_of(*held, index, generator);
    });
  }

  std::vector<std::int64_t> ends_;
  std::vector<std::function<Sample(std::int64_t, at::Generator&)>> gets_;
  bool random_ = false;
};
template <detail::dataset D, detail::dataset... Others>
ConcatDataset(D&&, Others&&...) -> ConcatDataset<detail::sample_t<D>>;
template <detail::dataset D>
ConcatDataset(std::vector<D>) -> ConcatDataset<detail::sample_t<D>>;

// Splits a dataset into parts with samples in random order. For the same generator (by default PyTorch's),
// the result is that of torch.utils.data.random_split. The parts are lengths that add up to the size, or
// fractions that add up to 1; with fractions, the first parts get the remaining samples, one each.
template <typename D, typename T, std::size_t N>
  requires std::is_arithmetic_v<T>
auto random_split(D&& dataset, const T (&parts)[N], std::optional<at::Generator> generator = {}) {
  const auto held = detail::hold(std::forward<D>(dataset));
  const std::vector<double> numbers(parts, parts + N);
  auto indices = detail::split(detail::size_of(*held), numbers, generator);
  const auto subsets = [&]<std::size_t... I>(std::index_sequence<I...>) {
    return std::array{Subset<detail::held_t<D>>(held, std::move(indices[I]))...};
  };
  return subsets(std::make_index_sequence<N>());
}
template <typename D, typename T>
  requires std::is_arithmetic_v<T>
auto random_split(D&& dataset, const std::vector<T>& parts, std::optional<at::Generator> generator = {}) {
  const auto held = detail::hold(std::forward<D>(dataset));
  std::vector<Subset<detail::held_t<D>>> subsets;
  for (auto& each : detail::split(detail::size_of(*held), {parts.begin(), parts.end()}, generator))
    subsets.emplace_back(held, std::move(each));
  return subsets;
}

}  // namespace lockstep

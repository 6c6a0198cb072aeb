// From indices to a batch: selects the dataset's method to call and reports its exceptions. What is not
// a template is defined in data/loader.cpp. Internal.
#pragma once

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
#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <lockstep/base/error.h>
#include <lockstep/data/collate.h>
#include <lockstep/data/pass/dataset_traits.h>

namespace lockstep::detail {

// One batch to fetch.
struct Task {
  std::vector<std::int64_t> indices;  // empty for a stream
  std::size_t count = 0;
  std::int64_t place = 0, stride = 1, position = 0;  // see Pass
  std::int64_t base_seed = 0;
};

// Seeds the generator for one sample's random numbers.
void seed_for(at::Generator& generator, std::int64_t base_seed, std::int64_t place);
// Throws a LoadError with the current exception nested in it.
[[noreturn]] void throw_load_error(const Task& task, std::optional<std::int64_t> index, int worker);
at::Tensor pinned(const at::Tensor& tensor);

// Moves all tensors of a batch to pinned memory. Other types are left alone unless they have pin_memory().
template <typename T>
void pin(T& x) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    if (x.defined()) x = pinned(x);
  } else if constexpr (requires { x = x.pin_memory(); }) {
    x = x.pin_memory();
  } else if constexpr (is_vector<T>) {
    for (auto& each : x) pin(each);
  } else if constexpr (is_map<T>) {
    for (auto& each : x) pin(each.second);
  } else if constexpr (has_fields<T>) {
    std::apply([](auto&... each) { (pin(each), ...); }, fields_of(x));
  }
}

template <typename T>
constexpr bool is_optional = false;
template <typename T>
constexpr bool is_optional<std::optional<T>> = true;

// Makes batches of D by Collate. One per worker.
template <typename D, typename Collate>
class Fetcher {
 public:
  static constexpr bool kOwnCollate = !std::same_as<Collate, DefaultCollate>;
  static constexpr bool kStream = torch_stream<std::remove_const_t<D>>;

  Fetcher(std::shared_ptr<D> dataset, const Collate* collate)
      : dataset_(std::move(dataset)), collate_(collate) {}

  // Calls at(index) before each sample, and stops if it returns false. Returns nullopt at the end of a
  // stream.
  template <typename At>
  auto operator()(const Task& task, int worker, const At& at) {
    std::optional<std::int64_t> index;
    try {
      return fetch(task, index, at);
    } catch (...) {
      throw_load_error(task, index, worker);
    }
  }

 private:
  template <typename T>
  static auto some(T batch) {
    return std::optional<T>(std::move(batch));
  }

  template <typename At>
  auto fetch(const Task& task, std::optional<std::int64_t>& index, const At& at) {
    using Plain = std::remove_const_t<D>;
    if constexpr (kStream) {
      return finished(dataset_->get_batch(task.count));
    } else if constexpr (torch_dataset<Plain>) {
      static_assert(std::same_as<typename Plain::BatchRequestType, c10::ArrayRef<std::size_t>>,
                    "a torch::data dataset must take a list of indices or a number of samples");
      const std::vector<std::size_t> indices(task.indices.begin(), task.indices.end());
      return finished(dataset_->get_batch(indices));
    } else if constexpr (batched<D> && !kOwnCollate) {
      return some(dataset_->get_batch(std::span<const std::int64_t>(task.indices)));
    } else {
      static_assert(single<D>, "a collate function needs a dataset with get(index)");
      return some((*collate_)(samples(task, index, at)));
    }
  }

  // Collates a list of samples. Returns a batch unchanged, unless the user passed a collate function.
  template <typename Batch>
  auto finished(Batch batch) {
    if constexpr (is_optional<Batch>) {
      using Finished = decltype(finished(std::move(*batch)));
      return batch ? finished(std::move(*batch)) : Finished();
    } else if constexpr (kOwnCollate || is_vector<Batch>) {
      return some((*collate_)(std::move(batch)));
    } else {
      return some(std::move(batch));
    }
  }

  template <typename At>
  auto samples(const Task& task, std::optional<std::int64_t>& index, const At& at) {
    const bool random = uses_random(*dataset_);
    std::vector<sample_t<D>> found;
    found.reserve(task.indices.size());
    auto place = task.place;
    for (const auto each : task.indices) {
      index = each;
      if (!at(each)) throw Error("cancelled: the DataLoader's iterator has ended");
      if (random) seed_for(generator_, task.base_seed, place);
      found.push_back(sample_of(*dataset_, each, generator_));
      place += task.stride;
    }
    index.reset();
    return found;
  }

  std::shared_ptr<D> dataset_;
  const Collate* collate_;
  at::Generator generator_;
};

}  // namespace lockstep::detail

// Datasets with indexed samples.
//
//   TensorDataset dataset(images, labels);
//   MapDataset pictures(100, [&](std::int64_t i) { return std::pair(decode(names[i]), labels[i]); });
//   MapDataset noisy(100, [&](std::int64_t i, at::Generator& random) { return add_noise(x[i], random); });
//
// Any class with size() and one of these methods is a dataset:
//
//   get(std::int64_t index)                            a sample of a type that collate.h or yours takes
//   get(std::int64_t index, at::Generator& random)     the same, with its own random number generator
//   get_batch(std::span<const std::int64_t> indices)   a batch; not with a collate function of yours
//
// So is every dataset of torch::data. With workers, several threads call these methods at once.
//
// Lockstep's datasets are handles: copies are cheap and share the same samples. Other datasets are held by
// reference if you pass a variable and moved if you pass a temporary; a std::shared_ptr is shared.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <lockstep/data/pass/dataset_traits.h>

namespace lockstep {

// Tensors with equal numbers of rows: sample i is row i of each. A batch is always gathered into new memory,
// even when its rows are contiguous, so changing it in place does not change the dataset.
template <std::size_t N>
class TensorDataset {
 public:
  static constexpr bool kHandle = true;

  template <std::convertible_to<at::Tensor>... T>
    requires(sizeof...(T) == N && N > 0)
  explicit TensorDataset(const T&... tensors) : tensors_{tensors...}, size_(detail::equal_rows(tensors_)) {}

  std::int64_t size() const { return size_; }
  const std::array<at::Tensor, N>& tensors() const { return tensors_; }
  std::array<at::Tensor, N> get(std::int64_t index) const {
    return each([&](const at::Tensor& t) { return detail::row(t, index); });
  }
  std::array<at::Tensor, N> get_batch(std::span<const std::int64_t> indices) const {
    return each([&](const at::Tensor& t) { return detail::rows(t, indices); });
  }

 private:
  std::array<at::Tensor, N> each(const auto& f) const {
    return std::apply([&](const auto&... t) { return std::array<at::Tensor, N>{f(t)...}; }, tensors_);
  }

  std::array<at::Tensor, N> tensors_;
  std::int64_t size_;
};
template <std::convertible_to<at::Tensor>... T>
TensorDataset(const T&...) -> TensorDataset<sizeof...(T)>;

// Sample i is f(i) or f(i, random). The random numbers depend only on the loader's seed and on the sample's
// position in the epoch: not on the number of workers or ranks, and not on a restart in between.
template <typename F>
class MapDataset {
 public:
  static constexpr bool kHandle = true;

  MapDataset(std::int64_t size, F f)
      : size_(detail::checked_size(size)), f_(std::make_shared<F>(std::move(f))) {}

  std::int64_t size() const { return size_; }
  static constexpr bool draws_random() { return !std::invocable<F&, std::int64_t>; }
  // Without a generator, uses PyTorch's default one.
  auto get(std::int64_t index, at::Generator generator = {}) const {
    detail::check_index(index, size_);
    if constexpr (draws_random())
      return (*f_)(index, generator);
    else
      return (*f_)(index);
  }

 private:
  std::int64_t size_;
  std::shared_ptr<F> f_;
};

}  // namespace lockstep

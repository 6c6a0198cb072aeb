// What a DataLoader can be told, and what it throws.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include <ATen/core/Generator.h>
#include <lockstep/base/error.h>

namespace lockstep {

struct DataLoaderOptions {
  std::int64_t batch_size = 1;
  bool shuffle = false;
  bool drop_last = false;  // leave out a last batch that is smaller
  int num_workers = 0;     // 0: the loop's own thread fetches, when it asks
  int prefetch_factor = 2;
  bool pin_memory = false;  // batches in memory that CUDA copies from directly; nothing without CUDA
  // Of the order and of the pass's seed. Nothing: PyTorch's default. A seed is a generator of the loader's
  // own.
  std::optional<at::Generator> generator = {};
  std::optional<std::uint64_t> seed = {};
  std::function<void(int worker)> worker_init = {};       // on each worker, first
  std::optional<std::chrono::milliseconds> timeout = {};  // how long to wait for workers; a LoadError then
};

// What a dataset or a collate threw, which is nested (std::rethrow_if_nested). The text begins with where.
class LoadError : public Error {
 public:
  LoadError(const std::string& text, std::optional<std::int64_t> index) : Error(text), index_(index) {}
  // Of the sample; nothing where a whole batch was fetched or put together.
  std::optional<std::int64_t> index() const noexcept { return index_; }

 private:
  std::optional<std::int64_t> index_;
};

}  // namespace lockstep

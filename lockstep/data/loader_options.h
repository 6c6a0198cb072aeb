// Options of a DataLoader, and its exception.
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
  bool drop_last = false;  // omit a last batch that is smaller
  int num_workers = 0;     // 0: the loop's own thread fetches each batch on demand
  int prefetch_factor = 2;
  bool pin_memory = false;  // pin batches in memory, for faster copies to the GPU; ignored without CUDA
  // Generator for the order and the pass's seed; by default PyTorch's. A seed creates a generator for this
  // loader alone.
  std::optional<at::Generator> generator = {};
  std::optional<std::uint64_t> seed = {};
  std::function<void(int worker)> worker_init = {};       // called first on each worker
  std::optional<std::chrono::milliseconds> timeout = {};  // limit on waiting for workers; then LoadError
};

// Wraps what a dataset or collate function threw (std::rethrow_if_nested). The text begins with the location.
class LoadError : public Error {
 public:
  LoadError(const std::string& text, std::optional<std::int64_t> index) : Error(text), index_(index) {}
  // Index of the sample; nullopt if a whole batch was being fetched or collated.
  std::optional<std::int64_t> index() const noexcept { return index_; }

 private:
  std::optional<std::int64_t> index_;
};

}  // namespace lockstep

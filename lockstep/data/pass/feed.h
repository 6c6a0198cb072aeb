// The part of a DataLoader that does not depend on the type of its batches. Defined in data/loader.cpp.
// Internal.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <lockstep/data/loader_options.h>
#include <lockstep/data/pass/fetch.h>
#include <lockstep/data/sampler.h>
#include <lockstep/data/torch_sampler.h>

namespace lockstep::detail {

// Validates the options (ConfigError) and turns a seed into a generator.
DataLoaderOptions checked(DataLoaderOptions options, bool has_sampler, bool is_stream);
std::size_t num_batches(std::optional<std::int64_t> num_samples, const DataLoaderOptions& options);
std::unique_ptr<Sampler> default_sampler(std::int64_t size, const DataLoaderOptions& options);

// Limits LibTorch to one thread in each worker, as in Python, then calls the user's init function.
void begin_worker(const std::function<void(int)>& init, int worker);
[[noreturn]] void throw_timeout(std::chrono::milliseconds timeout, const std::string& whereabouts);

// Turns a pass over a sampler into tasks, one per batch.
class Feed {
 public:
  Feed(Sampler& sampler, const DataLoaderOptions& options);
  // For a stream, which has no indices; nullopt: infinite.
  Feed(std::optional<std::int64_t> num_samples, const DataLoaderOptions& options);

  bool next(Task& task);                  // false at the end
  void delivered(std::int64_t position);  // takes Task::position
  void ended();

 private:
  std::unique_ptr<Pass> pass_;
  std::optional<std::int64_t> left_;  // samples left in a stream
  std::size_t batch_size_;
  bool drop_last_, ended_ = false;
  std::int64_t base_seed_, place_ = 0;
};

}  // namespace lockstep::detail

// What a DataLoader does whatever the type of its batches. Internal.
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

// The options, or ConfigError; a seed has become a generator.
DataLoaderOptions checked(DataLoaderOptions options, bool has_sampler, bool is_stream);
std::size_t num_batches(std::optional<std::int64_t> num_samples, const DataLoaderOptions& options);
std::unique_ptr<Sampler> default_sampler(std::int64_t size, const DataLoaderOptions& options);

// One thread of LibTorch's for each worker, as in Python; then the user's own preparations.
void begin_worker(const std::function<void(int)>& init, int worker);
[[noreturn]] void throw_timeout(std::chrono::milliseconds timeout, const std::string& whereabouts);

// The batches of a pass, as tasks.
class Feed {
 public:
  Feed(Sampler& sampler, const DataLoaderOptions& options);
  // Of a stream, by numbers of samples alone; nothing: without an end.
  Feed(std::optional<std::int64_t> num_samples, const DataLoaderOptions& options);

  bool next(Task& task);                  // false: there are no more
  void delivered(std::int64_t position);  // Task's
  void ended();

 private:
  std::unique_ptr<Pass> pass_;
  std::optional<std::int64_t> left_;  // of a stream
  std::size_t batch_size_;
  bool drop_last_, ended_ = false;
  std::int64_t base_seed_, place_ = 0;
};

}  // namespace lockstep::detail

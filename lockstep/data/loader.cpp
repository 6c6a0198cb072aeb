#include <lockstep/data/loader.h>

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <exception>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <lockstep/base/log.h>
#include <lockstep/comm/group/error_text.h>
#include <lockstep/data/core/permutation.h>

namespace lockstep::detail {
namespace {

std::string list_of(const std::vector<std::int64_t>& indices) {
  std::string text;
  for (std::size_t i = 0; i < std::min<std::size_t>(indices.size(), 8); ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(indices[i]);
  return indices.size() > 8 ? text + ", ... (" + std::to_string(indices.size()) + " in all)" : text;
}

// Caps the memory reserved for a batch that no pass can fill.
std::int64_t room_for_batch(const Sampler& sampler, std::int64_t batch_size) {
  constexpr std::int64_t kLarge = 1 << 20;  // up to this, do not call size(): it may cost a whole pass
  return batch_size <= kLarge ? batch_size : std::min(batch_size, std::max(sampler.size() + 1, kLarge));
}

std::int64_t draw_seed(const std::optional<at::Generator>& generator) {
  return at::empty({}, at::kLong).random_(generator).item<std::int64_t>();
}

}  // namespace

void seed_for(at::Generator& generator, std::int64_t base_seed, std::int64_t place) {
  const auto seed = mixed(mixed(static_cast<std::uint64_t>(base_seed)) + static_cast<std::uint64_t>(place));
  if (!generator.defined())
    generator = at::detail::createCPUGenerator(seed);
  else
    generator.set_current_seed(seed);
}

void throw_load_error(const Task& task, std::optional<std::int64_t> index, int worker) {
  const auto what = index                  ? "sample " + std::to_string(*index)
                    : task.indices.empty() ? "a batch of a stream"
                                           : "batch of samples " + list_of(task.indices);
  std::throw_with_nested(LoadError("DataLoader: " + what + " (worker " + std::to_string(worker) +
                                       "): " + plain_text(std::current_exception()),
                                   index));
}

at::Tensor pinned(const at::Tensor& tensor) {
  return tensor.is_cpu() && at::hasCUDA() ? tensor.pin_memory() : tensor;
}

DataLoaderOptions checked(DataLoaderOptions options, bool has_sampler, bool is_stream) {
  const auto refuse = [](const std::string& what) { throw ConfigError("DataLoader: " + what); };
  const auto above_zero = [&](const char* name, std::int64_t value) {
    if (value < 1) refuse(std::string(name) + ": expected at least 1, got " + std::to_string(value));
  };
  above_zero("batch_size", options.batch_size);
  above_zero("prefetch_factor", options.prefetch_factor);
  if (options.num_workers < 0)
    refuse("num_workers: expected 0 or more, got " + std::to_string(options.num_workers));
  if (options.timeout) above_zero("timeout in ms", options.timeout->count());
  if (options.generator && options.seed) refuse("generator and seed are mutually exclusive; set only one");
  if (options.shuffle && has_sampler) refuse("shuffle and a sampler are mutually exclusive; use only one");
  if (is_stream && (options.shuffle || options.drop_last || has_sampler))
    refuse("a stream has its own order; remove the sampler, shuffle and drop_last");
  if (options.seed)
    options.generator = at::detail::createCPUGenerator(*std::exchange(options.seed, std::nullopt));
  if (options.pin_memory && !at::hasCUDA()) {
    static std::atomic<bool> told = false;
    if (!told.exchange(true))
      log(LogLevel::warn, "DataLoader: pin_memory is ignored because there is no CUDA device");
  }
  return options;
}

std::size_t num_batches(std::optional<std::int64_t> num_samples, const DataLoaderOptions& options) {
  const auto samples = known_size(num_samples);
  const auto whole = samples / options.batch_size;
  return static_cast<std::size_t>(options.drop_last || samples % options.batch_size == 0 ? whole : whole + 1);
}

std::unique_ptr<Sampler> default_sampler(std::int64_t size, const DataLoaderOptions& options) {
  if (!options.shuffle) return std::make_unique<SequentialSampler>(size);
  return std::make_unique<RandomSampler>(size, RandomSamplerOptions{.generator = options.generator});
}

void begin_worker(const std::function<void(int)>& init, int worker) {
  // at::set_num_threads would also apply to threads started later, so call OpenMP directly, for this thread
  // only. LibTorch sets its own value on a thread's first use, so trigger that first.
  at::get_num_threads();
  using SetNumThreads = void (*)(int);
  static const auto set_num_threads =
      reinterpret_cast<SetNumThreads>(::dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (set_num_threads != nullptr) set_num_threads(1);
  if (init) init(worker);
}

void throw_timeout(std::chrono::milliseconds timeout, const std::string& whereabouts) {
  throw LoadError("DataLoader: no batch after " + std::to_string(timeout.count()) + " ms: " + whereabouts,
                  std::nullopt);
}

Feed::Feed(Sampler& sampler, const DataLoaderOptions& options)
    : pass_(sampler.pass()),
      batch_size_(static_cast<std::size_t>(room_for_batch(sampler, options.batch_size))),
      drop_last_(options.drop_last),
      base_seed_(pass_->base_seed([&] { return draw_seed(options.generator); })) {}

Feed::Feed(std::optional<std::int64_t> num_samples, const DataLoaderOptions& options)
    : left_(num_samples),
      batch_size_(static_cast<std::size_t>(options.batch_size)),
      drop_last_(false),
      base_seed_(draw_seed(options.generator)) {}

bool Feed::next(Task& task) {
  if (ended_) return false;
  task.base_seed = base_seed_;
  task.count = batch_size_;
  if (!pass_) {
    if (!left_) return true;
    task.count =
        static_cast<std::size_t>(std::min<std::int64_t>(*left_, static_cast<std::int64_t>(batch_size_)));
    *left_ -= static_cast<std::int64_t>(task.count);
    return task.count > 0;
  }
  task.indices.resize(batch_size_);
  task.count = pass_->next(task.indices);
  ended_ = task.count < batch_size_;
  if (task.count == 0 || (ended_ && drop_last_)) return false;
  task.indices.resize(task.count);
  const auto places = pass_->places().value_or(Pass::Places{place_, 1});
  task.place = places.first;
  task.stride = places.stride;
  task.position = pass_->position();
  place_ += static_cast<std::int64_t>(task.count);
  return true;
}

void Feed::delivered(std::int64_t position) {
  if (pass_) pass_->delivered(position);
}

void Feed::ended() {
  if (pass_) pass_->delivered(std::nullopt);
}

at::Tensor stacked(std::vector<at::Tensor> tensors) { return at::stack(tensors); }

at::Tensor tensor_of(const void* values, std::size_t count, at::ScalarType type) {
  return at::from_blob(const_cast<void*>(values), {static_cast<std::int64_t>(count)}, at::TensorOptions(type))
      .clone();
}

void refuse_lengths(std::size_t one, std::size_t other) {
  throw ConfigError("default collate: samples of one batch have different lengths (" + std::to_string(one) +
                    " and " + std::to_string(other) + "); pass a collate function to the DataLoader");
}

}  // namespace lockstep::detail

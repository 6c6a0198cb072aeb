// Samplers decide which samples a loader draws, in which order. They yield the same indices as
// torch.utils.data's samplers of the same names for the same generator state, and draw from the generator at
// the same points.
//
//   WeightedRandomSampler sampler(weights, 1000);
//   DataLoader loader(dataset, sampler, {.batch_size = 32});
//
// They also work with torch::data's loader: torch::data::make_data_loader(dataset, sampler, options).
//
// To write a sampler, implement size() and pass(), which returns the indices of one pass on demand. From a
// list: `return pass_over(std::move(indices));`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace lockstep {

// One pass over the samples. Not thread-safe.
class Pass {
 public:
  virtual ~Pass() = default;

  // Fills `out` with the next indices and returns their number; fewer than requested means the end.
  virtual std::size_t next(std::span<std::int64_t> out) = 0;

  // The rest matters only to samplers that can be saved in the middle of a pass or share it with other ranks.

  // Positions of the last next()'s indices in the pass of all ranks: the first one and the stride. A sample's
  // random numbers depend on its position. nullopt: the loader counts.
  struct Places {
    std::int64_t first = 0, stride = 1;
  };
  virtual std::optional<Places> places() const { return std::nullopt; }
  // Position at which to resume if the run is saved once the indices of the last next() have been delivered.
  virtual std::int64_t position() const { return 0; }
  // Called when the loop has received the samples up to `position`; nullopt: it has reached the end.
  virtual void delivered(std::optional<std::int64_t> position) { (void)position; }
  // The loader's seed for this pass: from `draw`, unless this pass resumes a saved one.
  virtual std::int64_t base_seed(const std::function<std::int64_t()>& draw) { return draw(); }
};

std::unique_ptr<Pass> pass_over(std::vector<std::int64_t> indices);

class Sampler {
 public:
  virtual ~Sampler() = default;
  virtual std::int64_t size() const = 0;     // number of indices in a whole pass
  virtual std::unique_ptr<Pass> pass() = 0;  // starts a pass, which may outlive the sampler

  // The interface of torch::data's samplers, for its loader. That loader keeps a copy, which shares the epoch
  // and state set here. Indices returned by next() count as delivered. With workers that loader draws them
  // early, so do not save the state in the middle of an epoch.
  using BatchRequestType = std::vector<std::size_t>;
  // Begins a pass. Throws ConfigError for a size other than this sampler's.
  void reset(std::optional<std::size_t> new_size = std::nullopt);
  std::optional<BatchRequestType> next(std::size_t batch_size);  // nullopt at the end of the pass

 private:
  std::shared_ptr<Pass> pass_of_torch_;
};

class SequentialSampler : public Sampler {
 public:
  explicit SequentialSampler(std::int64_t size) : size_(size) {}
  std::int64_t size() const override { return size_; }
  std::unique_ptr<Pass> pass() override;

 private:
  std::int64_t size_;
};

struct RandomSamplerOptions {
  bool replacement = false;
  std::optional<std::int64_t> num_samples = {};  // nullopt: size; without replacement, more repeats samples
  std::optional<at::Generator> generator = {};   // nullopt: a new one each pass, seeded from the default one
};

class RandomSampler : public Sampler {
 public:
  explicit RandomSampler(std::int64_t size, RandomSamplerOptions options = {});
  std::int64_t size() const override { return options_.num_samples.value_or(size_); }
  std::unique_ptr<Pass> pass() override;

 private:
  std::int64_t size_;
  RandomSamplerOptions options_;
};

// Yields the given indices in random order.
class SubsetRandomSampler : public Sampler {
 public:
  explicit SubsetRandomSampler(std::vector<std::int64_t> indices,
                               std::optional<at::Generator> generator = {});
  std::int64_t size() const override { return static_cast<std::int64_t>(indices_->size()); }
  std::unique_ptr<Pass> pass() override;

 private:
  std::shared_ptr<const std::vector<std::int64_t>> indices_;
  std::optional<at::Generator> generator_;
};

struct WeightedRandomSamplerOptions {
  bool replacement = true;
  std::optional<at::Generator> generator = {};
};

// Draws num_samples indices with the given weights, which must be at least 0 and not all 0; any sum will do.
class WeightedRandomSampler : public Sampler {
 public:
  WeightedRandomSampler(std::vector<double> weights, std::int64_t num_samples,
                        WeightedRandomSamplerOptions options = {});
  std::int64_t size() const override { return num_samples_; }
  std::unique_ptr<Pass> pass() override;

 private:
  at::Tensor weights_;
  std::int64_t num_samples_;
  WeightedRandomSamplerOptions options_;
};

}  // namespace lockstep

// Which samples, in which order. The same indices as torch.utils.data's samplers of the same names for the
// same state of the generator, and the same draws from it at the same moments.
//
//   WeightedRandomSampler sampler(weights, 1000);
//   DataLoader loader(dataset, sampler, {.batch_size = 32});
//
// In torch::data's loader: torch::data::make_data_loader(dataset, sampler, options).
//
// A sampler of your own: size(), and pass(), which gives the indices of one pass as they are asked for; from
// a list, `return pass_over(std::move(indices));`.
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

// Once through the samples. Used by one thread.
class Pass {
 public:
  virtual ~Pass() = default;

  // Fills `out` with the next indices and returns how many there were; fewer than asked for: that was the
  // end.
  virtual std::size_t next(std::span<std::int64_t> out) = 0;

  // What follows matters to samplers that can be saved in the middle of a pass, or share one with other
  // ranks.

  // Where the indices of the last next() stand in the pass of all ranks: the first, and from one to the next.
  // Random changes to a sample are drawn by its place. Nothing: the loader counts for itself.
  struct Places {
    std::int64_t first = 0, stride = 1;
  };
  virtual std::optional<Places> places() const { return std::nullopt; }
  // Where a run goes on that is saved when the indices of the last next() have been delivered.
  virtual std::int64_t position() const { return 0; }
  // The loop has the samples up to `position`; nothing: it has come to the end.
  virtual void delivered(std::optional<std::int64_t> position) { (void)position; }
  // The loader's seed for this pass: `draw` gives a new one, unless this pass goes on from a saved one.
  virtual std::int64_t base_seed(const std::function<std::int64_t()>& draw) { return draw(); }
};

std::unique_ptr<Pass> pass_over(std::vector<std::int64_t> indices);

class Sampler {
 public:
  virtual ~Sampler() = default;
  virtual std::int64_t size() const = 0;     // of a whole pass
  virtual std::unique_ptr<Pass> pass() = 0;  // a new one; it may outlive the sampler

  // As torch::data's samplers, for its loader, which has a copy: what an epoch or a state is set on reaches it.
  // What next() gave counts as delivered, and that loader asks early if it has workers: do not save the state
  // in the middle of an epoch then.
  using BatchRequestType = std::vector<std::size_t>;
  // Begins a pass. ConfigError for another size than this sampler's.
  void reset(std::optional<std::size_t> new_size = std::nullopt);
  std::optional<BatchRequestType> next(std::size_t batch_size);  // nothing: the pass has ended

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
  std::optional<std::int64_t> num_samples =
      {};                                       // nothing: size; more than size without replacement: repeated
  std::optional<at::Generator> generator = {};  // nothing: a new one each pass, its seed from the default one
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

// These indices in random order.
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

// num_samples indices, each drawn with its weight: not negative, not all zero, in any sum.
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

#include <lockstep/data/sampler.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <lockstep/base/error.h>
#include <lockstep/data/torch_sampler.h>

namespace lockstep {
namespace {

// A pass that generates its indices in pieces, each on demand, as a Python generator would.
class PieceByPiece : public Pass {
 public:
  std::size_t next(std::span<std::int64_t> out) override {
    std::size_t count = 0;
    while (count < out.size() && refill()) {
      const auto left = std::min(out.size() - count, piece_.size() - used_);
      std::copy_n(piece_.begin() + static_cast<std::ptrdiff_t>(used_), left,
                  out.begin() + static_cast<std::ptrdiff_t>(count));
      used_ += left;
      count += left;
    }
    return count;
  }

 protected:
  // Returns the next piece, which may be empty; nullopt at the end.
  virtual std::optional<std::vector<std::int64_t>> piece() = 0;

 private:
  bool refill() {
    while (!ended_ && used_ == piece_.size()) {
      auto more = piece();
      ended_ = !more;
      piece_ = std::move(more).value_or(std::vector<std::int64_t>());
      used_ = 0;
    }
    return !ended_;
  }

  std::vector<std::int64_t> piece_;
  std::size_t used_ = 0;
  bool ended_ = false;
};

std::vector<std::int64_t> values(const at::Tensor& indices) {
  const auto dense = indices.contiguous();
  const auto* begin = dense.const_data_ptr<std::int64_t>();
  return {begin, begin + dense.numel()};
}

const auto kIndex = at::TensorOptions(at::kLong);

class Counting : public Pass {
 public:
  explicit Counting(std::int64_t size) : size_(size) {}
  std::size_t next(std::span<std::int64_t> out) override {
    const auto count = std::min<std::int64_t>(static_cast<std::int64_t>(out.size()), size_ - next_);
    std::iota(out.begin(), out.begin() + count, next_);
    next_ += count;
    return static_cast<std::size_t>(count);
  }

 private:
  std::int64_t size_, next_ = 0;
};

class OnePiece : public PieceByPiece {
 public:
  explicit OnePiece(std::function<std::vector<std::int64_t>()> make) : make_(std::move(make)) {}

 protected:
  std::optional<std::vector<std::int64_t>> piece() override {
    if (!make_) return std::nullopt;
    return std::exchange(make_, nullptr)();
  }

 private:
  std::function<std::vector<std::int64_t>()> make_;
};

class Random : public PieceByPiece {
 public:
  Random(std::int64_t size, std::int64_t wanted, RandomSamplerOptions options)
      : size_(size), wanted_(wanted), options_(std::move(options)) {}

 protected:
  std::optional<std::vector<std::int64_t>> piece() override {
    if (ended_ || wanted_ == 0) return std::nullopt;
    if (!options_.generator) {
      const auto seed = at::empty({}, kIndex).random_().item<std::int64_t>();
      options_.generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed));
    }
    // 32 at a time, or a whole permutation; then the rest, which is drawn even if it is empty.
    const auto most = options_.replacement ? 32 : size_;
    const auto count = std::min(most, wanted_ - made_);
    ended_ = count < most;
    made_ += count;
    if (options_.replacement) return values(at::randint(size_, {count}, options_.generator, kIndex));
    auto order = values(at::randperm(size_, options_.generator, kIndex));
    order.resize(static_cast<std::size_t>(count));
    return order;
  }

 private:
  std::int64_t size_, wanted_, made_ = 0;
  RandomSamplerOptions options_;
  bool ended_ = false;
};

}  // namespace

std::unique_ptr<Pass> pass_over(std::vector<std::int64_t> indices) {
  return std::make_unique<OnePiece>([indices = std::move(indices)]() mutable { return std::move(indices); });
}

void Sampler::reset(std::optional<std::size_t> new_size) {
  if (new_size && static_cast<std::int64_t>(*new_size) != size())
    throw ConfigError("Sampler::reset: expected the sampler's size of " + std::to_string(size()) + ", got " +
                      std::to_string(*new_size) + "; create a new sampler for another size");
  pass_of_torch_ = pass();
}

std::optional<Sampler::BatchRequestType> Sampler::next(std::size_t batch_size) {
  if (!pass_of_torch_) reset();
  std::vector<std::int64_t> indices(batch_size);
  indices.resize(pass_of_torch_->next(indices));
  if (indices.empty()) {
    pass_of_torch_->delivered(std::nullopt);
    return std::nullopt;
  }
  pass_of_torch_->delivered(pass_of_torch_->position());
  return BatchRequestType(indices.begin(), indices.end());
}

namespace detail {

void refuse_sampler_size() {
  throw ConfigError(
      "DataLoader: the size of this sampler is unknown: it has no size() and cannot be copied for counting");
}

void refuse_sampler_count(std::size_t asked, std::size_t given) {
  throw ConfigError("DataLoader: the sampler returned " + std::to_string(given) + " indices; expected 1 to " +
                    std::to_string(asked) + ", or std::nullopt at the end");
}

void without_random_draws(const std::function<void()>& function) {
  auto generator = at::detail::getDefaultCPUGenerator();
  const auto state = [&] {
    const std::lock_guard lock(generator.mutex());
    return generator.get_state();
  }();
  struct Restore {
    at::Generator& generator;
    const at::Tensor& state;
    ~Restore() {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  } restore{generator, state};
  function();
}

}  // namespace detail

std::unique_ptr<Pass> SequentialSampler::pass() { return std::make_unique<Counting>(size_); }

RandomSampler::RandomSampler(std::int64_t size, RandomSamplerOptions options)
    : size_(size), options_(std::move(options)) {
  const auto wanted = options_.num_samples.value_or(size_);
  if (size < 0 || wanted < 0 || (size == 0 && wanted > 0))
    throw ConfigError("RandomSampler: cannot draw " + std::to_string(wanted) + " samples from a dataset of " +
                      std::to_string(size));
}

std::unique_ptr<Pass> RandomSampler::pass() { return std::make_unique<Random>(size_, size(), options_); }

SubsetRandomSampler::SubsetRandomSampler(std::vector<std::int64_t> indices,
                                         std::optional<at::Generator> generator)
    : indices_(std::make_shared<const std::vector<std::int64_t>>(std::move(indices))),
      generator_(std::move(generator)) {}

std::unique_ptr<Pass> SubsetRandomSampler::pass() {
  return std::make_unique<OnePiece>([indices = indices_, generator = generator_] {
    auto order = values(at::randperm(static_cast<std::int64_t>(indices->size()), generator, kIndex));
    for (auto& each : order) each = (*indices)[static_cast<std::size_t>(each)];
    return order;
  });
}

WeightedRandomSampler::WeightedRandomSampler(std::vector<double> weights, std::int64_t num_samples,
                                             WeightedRandomSamplerOptions options)
    : weights_(at::tensor(weights, at::kDouble)), num_samples_(num_samples), options_(std::move(options)) {
  double sum = 0;
  std::int64_t above_zero = 0;
  for (const double each : weights) {
    if (!(each >= 0))
      throw ConfigError("WeightedRandomSampler: weights: expected 0 or more, got " + std::to_string(each));
    sum += each;
    above_zero += each > 0;
  }
  if (!(sum > 0) || !std::isfinite(sum))
    throw ConfigError("WeightedRandomSampler: expected weights with a positive finite sum, got " +
                      std::to_string(sum));
  if (num_samples <= 0)
    throw ConfigError("WeightedRandomSampler: num_samples: expected at least 1, got " +
                      std::to_string(num_samples));
  if (!options_.replacement && num_samples > above_zero)
    throw ConfigError("WeightedRandomSampler: cannot draw " + std::to_string(num_samples) +
                      " samples without replacement: only " + std::to_string(above_zero) +
                      " weights are above 0");
}

std::unique_ptr<Pass> WeightedRandomSampler::pass() {
  return std::make_unique<OnePiece>([weights = weights_, count = num_samples_, options = options_] {
    return values(at::multinomial(weights, count, options.replacement, options.generator));
  });
}

}  // namespace lockstep

#include <lockstep/data/distributed_sampler.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <variant>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <lockstep/base/error.h>
#include <lockstep/data/core/permutation.h>

namespace lockstep {
namespace detail {

// Sequence of sample indices of one epoch; wraps around at its end.
class SampleOrder {
 public:
  SampleOrder(std::int64_t size, std::int64_t epoch, const DistributedSamplerOptions& options) : size_(size) {
    if (!options.shuffle || size == 0) return;
    if (options.elastic) {
      const auto key =
          mixed(mixed(static_cast<std::uint64_t>(options.seed)) + static_cast<std::uint64_t>(epoch));
      order_ = Permutation(static_cast<std::uint64_t>(size), key);
    } else {
      const auto seed = static_cast<std::uint64_t>(options.seed) + static_cast<std::uint64_t>(epoch);
      order_ = at::randperm(size, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kLong));
    }
  }

  std::int64_t operator[](std::int64_t place) const {
    place %= size_;
    if (const auto* table = std::get_if<at::Tensor>(&order_))
      return table->const_data_ptr<std::int64_t>()[place];
    if (const auto* computed = std::get_if<Permutation>(&order_))
      return static_cast<std::int64_t>((*computed)(static_cast<std::uint64_t>(place)));
    return place;
  }

 private:
  std::int64_t size_;
  std::variant<std::monostate, at::Tensor, Permutation> order_;
};

}  // namespace detail

namespace {

// What one rank gets when `left` samples are divided among the ranks.
struct SampleRange {
  std::int64_t first, count;
};

SampleRange range_of(std::int64_t left, int rank, int ranks, const DistributedSamplerOptions& options) {
  const auto each = left / ranks, rest = left % ranks;
  if (options.exact) return {rank * each + std::min<std::int64_t>(rank, rest), each + (rank < rest)};
  const auto count = options.drop_last || rest == 0 ? each : each + 1;
  return {rank * count, count};
}

}  // namespace

struct DistributedSampler::Shared {
  std::int64_t size;
  int rank, ranks;
  DistributedSamplerOptions options;
  std::int64_t epoch = 0, position = 0;
  std::optional<std::int64_t> base_seed = {};
  bool resume = false;  // True if the next pass begins at `position`
};

class DistributedSampler::Share : public Pass {
 public:
  explicit Share(std::shared_ptr<Shared> shared)
      : shared_(std::move(shared)),
        size_(shared_->size),
        order_(size_, shared_->epoch, shared_->options),
        epoch_(shared_->epoch) {
    if (std::exchange(shared_->resume, false))
      base_seed_ = shared_->base_seed;
    else
      shared_->position = 0;
    shared_->base_seed = base_seed_;
    begin_ = position_ = std::min(shared_->position, size_);
    left_ = range_of(size_ - begin_, shared_->rank, shared_->ranks, shared_->options).count;
  }

  std::size_t next(std::span<std::int64_t> out) override {
    const auto asked = static_cast<std::int64_t>(out.size());
    const auto count = shared_->options.elastic ? place_pieces(asked) : place_strides(asked);
    for (std::int64_t i = 0; i < count; ++i)
      out[static_cast<std::size_t>(i)] = order_[places_.first + i * places_.stride];
    return static_cast<std::size_t>(count);
  }

  std::optional<Places> places() const override { return places_; }
  std::int64_t position() const override { return position_; }

  void delivered(std::optional<std::int64_t> position) override {
    if (shared_->epoch == epoch_) shared_->position = position.value_or(size_);
  }

  std::int64_t base_seed(const std::function<std::int64_t()>& draw) override {
    if (!base_seed_) base_seed_ = draw();
    if (shared_->epoch == epoch_) shared_->base_seed = base_seed_;
    return *base_seed_;
  }

 private:
  // As in PyTorch: takes every ranks-th sample.
  std::int64_t place_strides(std::int64_t asked) {
    const auto count = std::min(asked, left_);
    places_ = {begin_ + taken_ * shared_->ranks + shared_->rank, shared_->ranks};
    taken_ += count;
    left_ -= count;
    position_ = std::min(begin_ + taken_ * shared_->ranks, size_);
    return count;
  }

  // Takes one contiguous piece of the batch that all ranks take together; at the end, of the rest.
  std::int64_t place_pieces(std::int64_t asked) {
    const auto rest = size_ - position_;
    const bool whole = asked <= rest / shared_->ranks;
    const auto part = whole ? SampleRange{shared_->rank * asked, asked}
                            : range_of(rest, shared_->rank, shared_->ranks, shared_->options);
    places_ = {position_ + part.first, 1};
    position_ = whole ? position_ + asked * shared_->ranks : size_;
    return part.count;
  }

  std::shared_ptr<Shared> shared_;
  std::int64_t size_;
  detail::SampleOrder order_;
  std::int64_t epoch_, begin_, position_, left_, taken_ = 0;
  Places places_;
  std::optional<std::int64_t> base_seed_;
};

DistributedSampler::DistributedSampler(std::int64_t size, const Group& group,
                                       DistributedSamplerOptions options)
    : DistributedSampler(size, group.rank(), group.size(), options) {}

DistributedSampler::DistributedSampler(std::int64_t size, int rank, int num_replicas,
                                       DistributedSamplerOptions options)
    : shared_(std::make_shared<Shared>(Shared{size, rank, num_replicas, options})) {
  if (size < 0)
    throw ConfigError("DistributedSampler: size: expected 0 or more, got " + std::to_string(size));
  if (num_replicas < 1 || rank < 0 || rank >= num_replicas)
    throw ConfigError("DistributedSampler: rank " + std::to_string(rank) + " is out of range for " +
                      std::to_string(num_replicas) + " replicas");
  if (options.drop_last && options.exact)
    throw ConfigError(
        "DistributedSampler: drop_last omits samples and exact keeps all of them; set only one of them");
}

std::int64_t DistributedSampler::size() const {
  return range_of(shared_->size, shared_->rank, shared_->ranks, shared_->options).count;
}

std::unique_ptr<Pass> DistributedSampler::pass() { return std::make_unique<Share>(shared_); }

void DistributedSampler::set_epoch(std::int64_t epoch) {
  if (epoch == shared_->epoch) return;
  shared_->epoch = epoch;
  shared_->position = 0;
  shared_->base_seed.reset();
  shared_->resume = false;
}

std::int64_t DistributedSampler::epoch() const { return shared_->epoch; }
std::int64_t DistributedSampler::position() const { return shared_->position; }

DistributedSampler::State DistributedSampler::state() const {
  const auto& s = *shared_;
  State state = {{"size", s.size},
                 {"seed", s.options.seed},
                 {"shuffle", s.options.shuffle},
                 {"elastic", s.options.elastic},
                 {"epoch", s.epoch},
                 {"position", s.position}};
  if (s.base_seed) state["base_seed"] = *s.base_seed;
  return state;
}

void DistributedSampler::load_state(const State& state) {
  const auto own = this->state();
  const auto value = [&](const std::string& key) {
    const auto found = state.find(key);
    if (found == state.end()) throw ConfigError("DistributedSampler::load_state: missing key '" + key + "'");
    return found->second;
  };
  for (const char* key : {"size", "seed", "shuffle", "elastic"})
    if (value(key) != own.at(key))
      throw ConfigError(std::string("DistributedSampler::load_state: ") + key + ": expected " +
                        std::to_string(own.at(key)) + ", got " + std::to_string(value(key)) +
                        "; the sequence of samples would differ");
  const auto position = value("position"), epoch = value("epoch");
  if (position < 0 || position > shared_->size)
    throw ConfigError("DistributedSampler::load_state: position: expected 0 to " +
                      std::to_string(shared_->size) + ", got " + std::to_string(position));
  shared_->epoch = epoch;
  shared_->position = position;
  const auto seed = state.find("base_seed");
  shared_->base_seed = seed == state.end() ? std::nullopt : std::optional(seed->second);
  shared_->resume = true;
}

}  // namespace lockstep

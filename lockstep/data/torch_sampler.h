// Adapter that makes torch::data's samplers usable as a Sampler. Internal.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <lockstep/data/pass/dataset_traits.h>
#include <lockstep/data/sampler.h>

namespace lockstep::detail {

// Samplers of indices: LibTorch's and those derived from torch::data::samplers::Sampler<>.
template <typename S>
concept torch_sampler = requires(S& sampler, std::size_t count) {
  sampler.reset(std::optional<std::size_t>());
  { sampler.next(count) } -> std::same_as<std::optional<std::vector<std::size_t>>>;
};

template <typename S>
concept sampler = std::derived_from<held_t<S>, Sampler> || torch_sampler<held_t<S>>;

[[noreturn]] void refuse_sampler_size();
[[noreturn]] void refuse_sampler_count(std::size_t asked, std::size_t given);
// Runs the function and restores the state of the default generator.
void without_random_draws(const std::function<void()>& function);

// A pass is a copy of the sampler, so that several can be in progress and each may outlive it. A sampler
// without a copy constructor is used directly.
template <torch_sampler S>
class TorchSampler final : public Sampler {
 public:
  explicit TorchSampler(std::shared_ptr<S> sampler) : sampler_(std::move(sampler)) {}

  // LibTorch's samplers have no size, so count the indices of a copy.
  std::int64_t size() const override {
    if constexpr (std::copy_constructible<S>) {
      std::int64_t size = 0;
      without_random_draws([&] {
        S copy = *sampler_;
        copy.reset(std::nullopt);
        while (const auto some = copy.next(1 << 16)) size += static_cast<std::int64_t>(some->size());
      });
      return size;
    } else {
      refuse_sampler_size();
    }
  }

  std::unique_ptr<Pass> pass() override {
    sampler_->reset(std::nullopt);
    if constexpr (std::copy_constructible<S>)
      return std::make_unique<Walk>(std::make_shared<S>(*sampler_));
    else
      return std::make_unique<Walk>(sampler_);
  }

 private:
  class Walk : public Pass {
   public:
    explicit Walk(std::shared_ptr<S> sampler) : sampler_(std::move(sampler)) {}

    // A torch::data sampler may return fewer indices than requested before its end; a Pass may not.
    std::size_t next(std::span<std::int64_t> out) override {
      std::size_t count = 0;
      while (count < out.size()) {
        const auto some = sampler_->next(out.size() - count);
        if (!some) break;
        if (some->empty() || some->size() > out.size() - count)
          refuse_sampler_count(out.size() - count, some->size());
        for (const auto index : *some) out[count++] = static_cast<std::int64_t>(index);
      }
      return count;
    }

   private:
    std::shared_ptr<S> sampler_;
  };

  std::shared_ptr<S> sampler_;
};

template <sampler S>
std::shared_ptr<Sampler> hold_sampler(S&& given) {
  if constexpr (std::derived_from<held_t<S>, Sampler>)
    return hold(std::forward<S>(given));
  else
    return std::make_shared<TorchSampler<held_t<S>>>(hold(std::forward<S>(given)));
}

}  // namespace lockstep::detail

// Iterates over a dataset in batches.
//
//   DataLoader loader(dataset, {.batch_size = 32, .shuffle = true, .num_workers = 2});
//   for (auto& [x, y] : loader) step(x, y);
//
//   DistributedSampler sampler(dataset.size(), world.group());
//   DataLoader shared(dataset, sampler, {.batch_size = 32});
//   DataLoader padded(texts, {.batch_size = 8}, [](std::vector<Text> samples) { return pad(samples); });
//
// Each begin() starts a new pass with its own workers; several passes may be in progress at once. Leaving a
// loop early stops its workers. For the same torch::manual_seed, the order is that of Python's DataLoader,
// and so are the draws from the generator: one for the pass and, with shuffle, one for its order. A sampler
// passed as a variable is held by reference, so that set_epoch takes effect; a temporary is moved. Samplers
// of torch::data work too: each pass resets the sampler and iterates over a copy. For datasets, see
// dataset.h.
//
// With num_workers threads, up to num_workers * prefetch_factor batches are prefetched; their order does not
// depend on the number of workers. An exception from a dataset or collate function leaves the loop nested in
// a LoadError, with or without workers. That batch is lost; iteration may continue with the next one.
#pragma once

#include <concepts>
#include <cstddef>
#include <iterator>
#include <memory>
#include <utility>

#include <lockstep/data/collate.h>
#include <lockstep/data/loader_options.h>
#include <lockstep/data/pass/loader_pass.h>
#include <lockstep/data/sampler.h>

namespace lockstep {

template <typename Dataset, typename Collate = DefaultCollate>
class DataLoader {
  using LoaderPass = detail::LoaderPass<Dataset, Collate>;

 public:
  using Batch = typename LoaderPass::Batch;

  template <typename D>
    requires std::same_as<detail::held_t<D>, Dataset>
  explicit DataLoader(D&& dataset, DataLoaderOptions options = {}, Collate collate = {})
      : core_(make(detail::hold(std::forward<D>(dataset)), nullptr, std::move(options), std::move(collate))) {
  }

  template <typename D, detail::sampler S>
    requires std::same_as<detail::held_t<D>, Dataset>
  explicit DataLoader(D&& dataset, S&& sampler, DataLoaderOptions options = {}, Collate collate = {})
      : core_(make(detail::hold(std::forward<D>(dataset)), detail::hold_sampler(std::forward<S>(sampler)),
                   std::move(options), std::move(collate))) {}

  // An input iterator; its copies share one position. You may modify the batch it points to and move from it.
  class Iterator {
   public:
    using iterator_concept = std::input_iterator_tag;
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;

    Batch& operator*() const { return *pass_->current(); }
    Batch* operator->() const { return pass_->current(); }
    Iterator& operator++() {
      pass_->drop();
      return *this;
    }
    void operator++(int) { ++*this; }
    friend bool operator==(const Iterator& it, std::default_sentinel_t) {
      return it.pass_->current() == nullptr;
    }

   private:
    friend class DataLoader;
    explicit Iterator(std::shared_ptr<LoaderPass> pass) : pass_(std::move(pass)) {}
    std::shared_ptr<LoaderPass> pass_;
  };

  Iterator begin() const { return Iterator(std::make_shared<LoaderPass>(core_)); }
  std::default_sentinel_t end() const { return {}; }

  // Number of batches in a whole pass. Throws ConfigError for a stream of unknown size.
  std::size_t size() const { return detail::num_batches(core_->num_samples(), core_->options); }
  const Dataset& dataset() const { return *core_->dataset; }

 private:
  using Core = detail::LoaderCore<Dataset, Collate>;
  static std::shared_ptr<Core> make(std::shared_ptr<Dataset> dataset, std::shared_ptr<Sampler> sampler,
                                    DataLoaderOptions options, Collate collate) {
    auto checked = detail::checked(std::move(options), sampler != nullptr, Core::kStream);
    return std::make_shared<Core>(
        Core{std::move(dataset), std::move(sampler), std::move(checked), std::move(collate)});
  }

  std::shared_ptr<Core> core_;
};

template <typename D>
DataLoader(D&&, DataLoaderOptions = {}) -> DataLoader<detail::held_t<D>>;
template <typename D, typename Collate>
DataLoader(D&&, DataLoaderOptions, Collate) -> DataLoader<detail::held_t<D>, Collate>;
template <typename D, detail::sampler S>
DataLoader(D&&, S&&, DataLoaderOptions = {}) -> DataLoader<detail::held_t<D>>;
template <typename D, detail::sampler S, typename Collate>
DataLoader(D&&, S&&, DataLoaderOptions, Collate) -> DataLoader<detail::held_t<D>, Collate>;

}  // namespace lockstep

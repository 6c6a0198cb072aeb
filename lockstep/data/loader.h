// Batches of a dataset, as a range.
//
//   DataLoader loader(dataset, {.batch_size = 32, .shuffle = true, .num_workers = 2});
//   for (auto& [x, y] : loader) step(x, y);
//
//   DistributedSampler sampler(dataset.size(), world.group());
//   DataLoader shared(dataset, sampler, {.batch_size = 32});
//   DataLoader padded(texts, {.batch_size = 8}, [](std::vector<Text> samples) { return pad(samples); });
//
// Each begin() is a new pass, with workers of its own; several may be under way. Leaving a loop early ends
// its workers. The same order as Python's DataLoader for the same torch::manual_seed, and the same draws from
// the generator: one for the pass and, with shuffle, one for its order. A sampler that is a variable is
// referred to, so that set_epoch reaches it; a temporary is moved in. It may be one of torch::data's, too: each
// pass resets it and goes through a copy. Datasets: see dataset.h.
//
// With num_workers threads, up to num_workers * prefetch_factor batches are fetched ahead; they come in order
// whatever their number. An exception of a dataset or collate comes out of the loop as a LoadError around it,
// with workers or without; the batch is lost, and the loop may go on behind it.
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

  // An input iterator; its copies are at the same batch. What it points to may be changed and moved from.
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

  // How many batches a whole pass has. ConfigError where a stream does not know its size.
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

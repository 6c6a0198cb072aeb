// One pass of a DataLoader: draws tasks, fetches them here or in workers, and delivers batches. Internal.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <lockstep/base/span.h>
#include <lockstep/data/core/workers.h>
#include <lockstep/data/pass/feed.h>
#include <lockstep/data/pass/fetch.h>
#include <lockstep/data/sampler.h>

namespace lockstep::detail {

template <typename Dataset, typename Collate>
struct LoaderCore {
  static constexpr bool kStream = Fetcher<Dataset, Collate>::kStream;

  std::shared_ptr<Dataset> dataset;
  std::shared_ptr<Sampler> sampler;  // null: each pass creates the default one for the dataset's size
  DataLoaderOptions options;
  Collate collate;

  std::optional<std::int64_t> num_samples() const {
    return sampler ? std::optional(sampler->size()) : size_if_known(*dataset);
  }
};

template <typename Dataset, typename Collate>
class LoaderPass {
  using Core = LoaderCore<Dataset, Collate>;
  using Fetch = Fetcher<Dataset, Collate>;
  static constexpr auto kGoOn = [](std::int64_t) { return true; };

 public:
  using Batch = typename decltype(std::declval<Fetch&>()(Task(), 0, kGoOn))::value_type;

  explicit LoaderPass(std::shared_ptr<Core> core) : core_(std::move(core)), feed_(make_feed(*core_)) {
    if constexpr (torch_stream<std::remove_const_t<Dataset>>)
      if constexpr (is_optional<typename Dataset::BatchType>) core_->dataset->reset();
    const auto& options = core_->options;
    const int threads = options.num_workers;
    for (int worker = 0; worker < std::max(threads, 1); ++worker)
      fetchers_.emplace_back(dataset_for(threads), &core_->collate);
    if (threads == 0) return;
    slots_.resize(static_cast<std::size_t>(threads) * static_cast<std::size_t>(options.prefetch_factor));
    workers_ = std::make_unique<Workers>(
        Workers::Options{.threads = threads,
                         .slots = slots_.size(),
                         .work = [this](Workers& workers, int worker,
                                        std::size_t slot) { work(workers, worker, slots_[slot]); },
                         .begin = [&init = options.worker_init](int worker) { begin_worker(init, worker); }});
    while (drawn_ - received_ < slots_.size() && put()) {
    }
  }

  // The loop's current batch, fetched on first use; null at the end.
  Batch* current() {
    while (!current_ && !ended_) advance();
    return current_ ? &*current_ : nullptr;
  }
  void drop() {
    if (current() != nullptr) current_.reset();
  }

 private:
  struct Slot {
    Task task;
    std::optional<Batch> batch;
  };

  static Feed make_feed(Core& core) {
    if constexpr (Core::kStream) {
      // A stateful dataset reports its own end.
      const bool ends = is_optional<typename Dataset::BatchType>;
      return Feed(ends ? std::nullopt : size_if_known(*core.dataset), core.options);
    } else {
      if (core.sampler) return Feed(*core.sampler, core.options);
      return Feed(*default_sampler(size_of(*core.dataset), core.options), core.options);
    }
  }

  // As in LibTorch, each worker has a copy of its dataset, which need not be thread-safe. Streams are shared.
  std::shared_ptr<Dataset> dataset_for(int threads) const {
    if constexpr (torch_dataset<std::remove_const_t<Dataset>> && !Core::kStream &&
                  std::copy_constructible<Dataset>)
      if (threads > 0) return std::make_shared<Dataset>(*core_->dataset);
    return core_->dataset;
  }

  void advance() {
    const detail::Span span(detail::SpanKind::data, "data");
    if (!workers_) {
      Task task;
      if (!feed_.next(task)) return end();
      auto batch = fetchers_[0](task, 0, kGoOn);
      if (!batch) return end();
      if (core_->options.pin_memory) pin(*batch);
      return deliver(task.position, std::move(*batch));
    }
    if (received_ == drawn_) return end();
    Slot& slot = slots_[received_ % slots_.size()];
    bool there = false;
    try {
      there = workers_->wait(received_ % slots_.size(), core_->options.timeout);
    } catch (...) {  // this batch is lost; later ones are not
      ++received_;
      put();
      throw;
    }
    if (!there) throw_timeout(*core_->options.timeout, workers_->whereabouts());
    ++received_;
    auto batch = std::exchange(slot.batch, std::nullopt);
    if (!batch) {  // end of the stream; another worker may have got its last batch for a later task
      over_ = true;
      return;
    }
    const auto position = slot.task.position;
    put();
    deliver(position, std::move(*batch));
  }

  void deliver(std::int64_t position, Batch batch) {
    current_.emplace(std::move(batch));
    feed_.delivered(position);
  }
  void end() {
    ended_ = true;
    feed_.ended();
    workers_.reset();
  }

  bool put() {
    if (over_) return false;
    const auto slot = drawn_ % slots_.size();
    if (!feed_.next(slots_[slot].task)) return false;
    ++drawn_;
    workers_->put(slot);
    return true;
  }

  void work(Workers& workers, int worker, Slot& slot) {
    slot.batch.reset();
    slot.batch = fetchers_[static_cast<std::size_t>(worker)](slot.task, worker, [&](std::int64_t index) {
      workers.at(worker, index);
      return !workers.stopping();
    });
    if (slot.batch && core_->options.pin_memory) pin(*slot.batch);
  }

  std::shared_ptr<Core> core_;
  Feed feed_;
  std::vector<Fetch> fetchers_;
  std::vector<Slot> slots_;
  std::size_t drawn_ = 0, received_ = 0;  // numbers of tasks since the pass began
  std::optional<Batch> current_;
  bool over_ = false, ended_ = false;  // nothing left to draw; nothing left to deliver
  std::unique_ptr<Workers> workers_;   // destroyed first: its threads use the other members
};

}  // namespace lockstep::detail

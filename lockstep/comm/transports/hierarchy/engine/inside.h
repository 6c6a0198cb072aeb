// Inside: collectives of one host's ranks, as steps of operations over several hosts. Does not use LibTorch.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include <lockstep/comm/transports/shm/engine/engine.h>

namespace lockstep::hierarchy {

using Clock = detail::AwakeClock;

class Inside {
 public:
  // engine: null if this rank is alone on its host.
  Inside(std::unique_ptr<shm::Engine> engine, int place, int ranks);

  bool alone() const { return engine_ == nullptr; }
  int ranks() const { return ranks_; }

  // Arguments are indexed by the ranks' places on this host. Sizes are in bytes, for all ranks.
  void all_gather(const void* own, std::vector<void*> from_each, std::span<const std::size_t> sizes,
                  Clock::time_point deadline);
  void broadcast(int root, void* data, std::size_t bytes, Clock::time_point deadline);
  // from_each: on the root only.
  void gather(int root, const void* own, std::size_t bytes, std::vector<void*> from_each,
              std::span<const std::size_t> sizes, Clock::time_point deadline);
  // to_each: on the root only.
  void scatter(int root, std::vector<const void*> to_each, std::span<const std::size_t> sizes, void* own,
               std::size_t bytes, Clock::time_point deadline);
  void all_to_all(std::vector<const void*> to_each, std::span<const std::size_t> to,
                  std::vector<void*> from_each, std::span<const std::size_t> from,
                  Clock::time_point deadline);
  // The tree over this host's ranks. Counts are in elements.
  void reduce_scatter(Dtype dtype, ReduceOp op, std::vector<const void*> to_each,
                      std::span<const std::size_t> counts, void* own, Clock::time_point deadline);

  // Tells this host's ranks that this rank waits for a rank of another host.
  void waits_elsewhere(std::optional<int> rank) {
    if (engine_) engine_->barrier().waits_elsewhere(rank);
  }
  void give_up() noexcept {
    if (engine_) engine_->give_up();
  }
  void interrupt(const std::string& cause) {
    if (engine_) engine_->interrupt(cause);
  }
  bool is_awaited() const { return engine_ && engine_->is_awaited(); }
  std::string absent() const { return engine_ ? engine_->absent() : std::string(); }

 private:
  void run(Clock::time_point deadline);
  Call& start(Operation operation, Dtype dtype, std::size_t item_size);

  const std::unique_ptr<shm::Engine> engine_;
  const int place_, ranks_;
  shm::Op part_;
};

}  // namespace lockstep::hierarchy

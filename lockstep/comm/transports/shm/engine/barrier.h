// Barrier: where the ranks of a group wait for each other. Each rank counts the steps that it has reached, on
// a cache line that only it writes, so arriving is one store. A waiter spins briefly if there is a processor
// for every rank, and otherwise sleeps at once; the last rank to arrive wakes all of them with one call.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/base/awake_clock.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/transports/shm/engine/futex.h>
#include <lockstep/comm/transports/shm/engine/region.h>

namespace lockstep::shm {

using Clock = detail::AwakeClock;  // deadlines do not pass while this rank is stopped

// Why a wait ended early. The group cannot be used afterwards.
class Interrupted : public std::runtime_error, public detail::Kinded {
 public:
  explicit Interrupted(const std::string& text) : runtime_error(text), Kinded(CommError::Kind::stopped) {}
};
class TimedOut : public std::runtime_error, public detail::Kinded {
 public:
  explicit TimedOut(const std::string& text) : runtime_error(text), Kinded(CommError::Kind::deadline) {}
};
class PeerLost : public std::runtime_error, public detail::Kinded {
 public:
  PeerLost(int lost, const std::string& text)
      : runtime_error(text), Kinded(CommError::Kind::peer_died), rank(lost) {}
  const int rank;  // the rank's name
};

class Barrier;
// Limit of a wait for a peer outside the barrier itself. The waiter calls check() now and then.
struct WaitLimit {
  const Barrier& barrier;
  Clock::time_point deadline;
  void check() const;  // throws what a wait would throw
};

class Barrier {
 public:
  // spin: how long a wait may occupy its processor. names: of the ranks, in errors; empty: their numbers.
  Barrier(Region region, int rank, std::chrono::nanoseconds spin, std::vector<int> names = {})
      : region_(region), rank_(rank), spin_(spin), names_(std::move(names)) {}

  const Region& region() const { return region_; }
  int rank() const { return rank_; }
  int ranks() const { return region_.ranks(); }
  int name(int rank) const { return names_.empty() ? rank : names_.at(static_cast<std::size_t>(rank)); }
  // The last step that this rank has reached. Data for the next one goes to the slots of step() + 1.
  std::uint64_t step() const { return step_; }

  // Called by one thread at a time.
  void arrive();
  void await_all(Clock::time_point deadline) {
    await([this] { return all_at(step_); }, deadline);
  }
  // Waits until done(), which must be cheap and turns true by an action of another rank before it calls
  // tell().
  template <typename Done>
  void await(Done done, Clock::time_point deadline);
  void tell();  // wakes peers after a change that they may wait for

  // Thread-safe; for messages. Each rank has a bell, which its peers ring when there is something for it.
  std::uint32_t bell() const { return region_.line(rank_).bell.load(std::memory_order_seq_cst); }
  void ring(int rank);
  void sleep(std::uint32_t bell, std::chrono::nanoseconds limit);
  // Why nothing more can come from that rank, or null; of any rank, if `peer` is not one.
  std::exception_ptr lost(int peer) const;

  // Shown to peers while this rank waits for a rank that does not take part in the barrier.
  void waits_elsewhere(std::optional<int> name) {
    region_.line(rank_).waits_for.store(name ? *name + 1 : 0, std::memory_order_release);
  }

  // Ends every wait with Interrupted, now and later. Thread-safe.
  void interrupt(const std::string& cause);
  // This rank arrives no more: kLeft, or kFailed if it aborted an operation that peers are in. Ranks that
  // wait for it get PeerLost.
  void leave(std::uint32_t how = Line::kLeft);
  // True if a peer has reached a step that this rank has not. While this rank has no operation in progress,
  // that is an operation that it has not begun.
  bool is_awaited() const;
  std::string absent() const;  // "rank 1 has not arrived": the ranks that delay their peers

 private:
  bool all_at(std::uint64_t step) const {
    for (int r = 0; r < ranks(); ++r)
      if (region_.line(r).arrived.load(std::memory_order_seq_cst) < step) return false;
    return true;
  }
  void wake();
  void check_others() const {
    for (int r = 0; r < ranks(); ++r)
      if (region_.line(r).presence.load(std::memory_order_seq_cst) == Line::kFailed) gave_up(r);
  }
  [[noreturn]] void gave_up(int rank) const;
  friend struct WaitLimit;
  std::exception_ptr look_around(Clock::time_point deadline) const;
  bool has_ended(int rank) const;
  std::exception_ptr gone(int rank) const;

  const Region region_;
  const int rank_;
  const std::chrono::nanoseconds spin_;
  const std::vector<int> names_;
  std::uint64_t step_ = 0;
  std::atomic<bool> interrupted_ = false;
  mutable std::mutex mutex_;
  std::string cause_;
};

template <typename Done>
void Barrier::await(Done done, Clock::time_point deadline) {
  LOCKSTEP_SHM_PAUSE();
  if (done()) return check_others();
  if (spin_.count() > 0) {
    const auto until = Clock::now() + spin_;
    do {
      for (int i = 0; i < 64; ++i) {
        relax();
        if (done()) return check_others();
      }
    } while (Clock::now() < until && !interrupted_.load(std::memory_order_relaxed));
  }
  // Peers that have died are looked for at the same interval.
  constexpr std::chrono::milliseconds kSlice(20);
  Shared& shared = region_.shared();
  auto& presence = region_.line(rank_).presence;
  for (;;) {
    const auto epoch = shared.epoch.load(std::memory_order_acquire);
    shared.sleepers.fetch_add(1, std::memory_order_seq_cst);
    LOCKSTEP_SHM_PAUSE();
    // Either this rank sees what the last one did, or the last one sees that this rank sleeps.
    if (!done() && !interrupted_.load(std::memory_order_acquire)) futex_wait(shared.epoch, epoch, kSlice);
    shared.sleepers.fetch_sub(1, std::memory_order_relaxed);
    if (done()) return check_others();
    const auto trouble = look_around(deadline);
    if (!trouble) continue;
    // Peers must know before this rank releases its tensors, unless the operation completes after all.
    presence.store(Line::kFailed, std::memory_order_seq_cst);
    LOCKSTEP_SHM_PAUSE();
    if (!done()) {
      wake();
      std::rethrow_exception(trouble);
    }
    presence.store(Line::kHere, std::memory_order_seq_cst);
    return check_others();
  }
}

}  // namespace lockstep::shm

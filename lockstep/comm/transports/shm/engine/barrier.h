// Where the ranks of a group wait for one another: each says how many steps it has come to, on a line of its
// own; nobody changes what another writes, so coming is one store. Who waits spins a little where there is a
// processor for every rank, and else sleeps at once; the last to come wakes them all with one call.
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

// Why a wait ended without what it waited for. The group is of no use afterwards.
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
  const int rank;  // as it is called
};

class Barrier;
// How long something may take: asked now and then by whoever waits for a peer outside the meeting itself.
struct WaitLimit {
  const Barrier& barrier;
  Clock::time_point deadline;
  void check() const;  // throws as a wait would
};

class Barrier {
 public:
  // spin: how long a wait may keep its processor. names: of the ranks, in errors; none: their numbers.
  Barrier(Region region, int rank, std::chrono::nanoseconds spin, std::vector<int> names = {})
      : region_(region), rank_(rank), spin_(spin), names_(std::move(names)) {}

  const Region& region() const { return region_; }
  int rank() const { return rank_; }
  int ranks() const { return region_.ranks(); }
  int name(int rank) const { return names_.empty() ? rank : names_.at(static_cast<std::size_t>(rank)); }
  // The one that this rank has come to last. What is written for the next goes to slots of step() + 1.
  std::uint64_t step() const { return step_; }

  // By one thread at a time.
  void arrive();
  void await_all(Clock::time_point deadline) {
    await([this] { return all_at(step_); }, deadline);
  }
  // Until done(), which is cheap to ask and turns true by what another rank does before it calls tell().
  template <typename Done>
  void await(Done done, Clock::time_point deadline);
  void tell();  // something that others may wait for has happened

  // For messages, any thread: a rank's bell, which its peers ring when there is something for it.
  std::uint32_t bell() const { return region_.line(rank_).bell.load(std::memory_order_seq_cst); }
  void ring(int rank);
  void sleep(std::uint32_t bell, std::chrono::nanoseconds limit);
  // Why that rank will say no more, if so; any other rank, if it is not a rank.
  std::exception_ptr lost(int peer) const;

  // While this rank waits for one that is not of the meeting: what the others are told of it.
  void waits_elsewhere(std::optional<int> name) {
    region_.line(rank_).waits_for.store(name ? *name + 1 : 0, std::memory_order_release);
  }

  // Any thread: every wait ends with Interrupted, now and later.
  void interrupt(const std::string& cause);
  // This rank comes no more: kLeft, or kFailed where it has given up what others are in. Whoever waits for it
  // gets PeerLost.
  void leave(std::uint32_t how = Line::kLeft);
  // A peer has come to a step that this rank has not: while no operation of this rank is under way, to one that
  // it has not begun.
  bool is_awaited() const;
  std::string absent() const;  // "rank 1 has not come": who keeps the others waiting

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
  // Peers that have died are looked for as often.
  constexpr std::chrono::milliseconds kSlice(20);
  Shared& shared = region_.shared();
  auto& presence = region_.line(rank_).presence;
  for (;;) {
    const auto epoch = shared.epoch.load(std::memory_order_acquire);
    shared.sleepers.fetch_add(1, std::memory_order_seq_cst);
    LOCKSTEP_SHM_PAUSE();
    // Either we see here what the last one did, or it sees that we sleep.
    if (!done() && !interrupted_.load(std::memory_order_acquire)) futex_wait(shared.epoch, epoch, kSlice);
    shared.sleepers.fetch_sub(1, std::memory_order_relaxed);
    if (done()) return check_others();
    const auto trouble = look_around(deadline);
    if (!trouble) continue;
    // The others must know before this rank lets go of its tensors; or else it is done after all.
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

#include <lockstep/comm/transports/shm/engine/barrier.h>

#include <cerrno>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace lockstep::shm {

#ifdef LOCKSTEP_SHM_PLANTED_RACE  // for a test which shows that this race would be found
constexpr auto kComing = std::memory_order_relaxed;
#else
constexpr auto kComing = std::memory_order_seq_cst;
#endif

void Barrier::arrive() {
  LOCKSTEP_SHM_PAUSE();
  ++step_;
  region_.line(rank_).arrived.store(step_, kComing);
  LOCKSTEP_SHM_PAUSE();
  // Only the last rank needs to wake the others. If two arrive at once, at least one of them sees both.
  if (region_.shared().sleepers.load(std::memory_order_seq_cst) != 0 && all_at(step_)) wake();
}

void WaitLimit::check() const {
  if (auto trouble = barrier.look_around(deadline)) std::rethrow_exception(trouble);
}

void Barrier::tell() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (region_.shared().sleepers.load(std::memory_order_seq_cst) != 0) wake();
}

void Barrier::wake() {
  LOCKSTEP_SHM_PAUSE();
  region_.shared().epoch.fetch_add(1, std::memory_order_release);
  futex_wake_all(region_.shared().epoch);
}

void Barrier::interrupt(const std::string& cause) {
  {
    std::lock_guard lock(mutex_);
    if (cause_.empty()) cause_ = cause;
  }
  interrupted_.store(true, std::memory_order_release);
  wake();
}

void Barrier::leave(std::uint32_t how) {
  std::uint32_t here = Line::kHere;
  region_.line(rank_).presence.compare_exchange_strong(here, how);
  wake();
}

void Barrier::gave_up(int rank) const {
  throw PeerLost(name(rank), fmt::format("rank {} has aborted the operation", name(rank)));
}

bool Barrier::has_ended(int rank) const {
  // The lock is held by a thread that lives as long as its process. Once the process has ended, the first
  // rank to try the lock gets it and informs the others. (If it were left inconsistent, the lock itself would
  // report that, but glibc then forgets to release it.)
  Line& line = region_.line(rank);
  if (line.ended.load(std::memory_order_acquire) != 0) return true;
  const int held = ::pthread_mutex_trylock(&line.alive);
  if (held == EOWNERDEAD) {
    line.ended.store(1, std::memory_order_release);
    ::pthread_mutex_consistent(&line.alive);
  }
  if (held == 0 || held == EOWNERDEAD) ::pthread_mutex_unlock(&line.alive);
  return held == EOWNERDEAD;
}

std::exception_ptr Barrier::gone(int rank) const {
  auto lost = [&](const std::string& how) {
    return std::make_exception_ptr(PeerLost(name(rank), fmt::format("rank {} {}", name(rank), how)));
  };
  const Line& line = region_.line(rank);
  if (has_ended(rank)) return lost("has ended");
  const auto presence = line.presence.load(std::memory_order_acquire);
  if (presence == Line::kHere) return nullptr;
  if (const auto other = line.waits_for.load(std::memory_order_acquire); other != 0)
    return lost(fmt::format("gave up waiting for rank {} on another host", other - 1));
  return lost(presence == Line::kLeft ? "has left the group" : "has aborted the operation");
}

std::exception_ptr Barrier::look_around(Clock::time_point deadline) const {
  if (interrupted_.load(std::memory_order_acquire)) {
    std::lock_guard lock(mutex_);
    return std::make_exception_ptr(Interrupted(cause_));
  }
  // A rank that has reached this step may leave afterwards, but not abort it.
  for (int r = 0; r < ranks(); ++r) {
    const Line& line = region_.line(r);
    if (r != rank_ && (has_ended(r) || line.arrived.load(std::memory_order_acquire) < step_ ||
                       line.presence.load(std::memory_order_acquire) == Line::kFailed))
      if (auto trouble = gone(r)) return trouble;
  }
  if (Clock::now() >= deadline) return std::make_exception_ptr(TimedOut("the deadline has passed"));
  return nullptr;
}

std::exception_ptr Barrier::lost(int peer) const {
  std::exception_ptr trouble;
  bool somebody = false;
  for (int r = 0; r < ranks(); ++r) {
    if (r == rank_ || (peer >= 0 && r != peer)) continue;
    trouble = gone(r);
    somebody = somebody || !trouble;
  }
  return somebody ? nullptr : trouble;
}

void Barrier::ring(int rank) {
  Line& line = region_.line(rank);
  line.bell.fetch_add(1, std::memory_order_seq_cst);
  LOCKSTEP_SHM_PAUSE();
  if (line.listens.load(std::memory_order_seq_cst) != 0) futex_wake_all(line.bell);
}

void Barrier::sleep(std::uint32_t bell, std::chrono::nanoseconds limit) {
  Line& line = region_.line(rank_);
  line.listens.fetch_add(1, std::memory_order_seq_cst);
  LOCKSTEP_SHM_PAUSE();
  futex_wait(line.bell, bell, limit);
  line.listens.fetch_sub(1, std::memory_order_relaxed);
}

bool Barrier::is_awaited() const {
  const auto own = region_.line(rank_).arrived.load(std::memory_order_acquire);
  for (int r = 0; r < ranks(); ++r)
    if (region_.line(r).arrived.load(std::memory_order_acquire) > own) return true;
  return false;
}

std::string Barrier::absent() const {
  std::vector<int> missing;
  std::vector<std::string> texts;
  for (int r = 0; r < ranks(); ++r) {
    const Line& line = region_.line(r);
    if (line.arrived.load(std::memory_order_acquire) >= step_) continue;
    if (const auto other = line.waits_for.load(std::memory_order_acquire); other != 0)
      texts.push_back(fmt::format("rank {} waits for rank {} on another host", name(r), other - 1));
    else
      missing.push_back(name(r));
  }
  if (!missing.empty())
    texts.push_back(fmt::format("rank{} {} {} not arrived", missing.size() > 1 ? "s" : "",
                                fmt::join(missing, ", "), missing.size() > 1 ? "have" : "has"));
  return fmt::format("{}", fmt::join(texts, "; "));
}

}  // namespace lockstep::shm

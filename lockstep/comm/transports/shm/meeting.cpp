#include <lockstep/comm/transports/shm/meeting.h>

#include <cerrno>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace lockstep::shm {

#ifdef LOCKSTEP_SHM_PLANTED_RACE  // a test shows that it would be found
constexpr auto kComing = std::memory_order_relaxed;
#else
constexpr auto kComing = std::memory_order_seq_cst;
#endif

void Meeting::arrive() {
  LOCKSTEP_SHM_PAUSE();
  ++step_;
  region_.line(rank_).arrived.store(step_, kComing);
  LOCKSTEP_SHM_PAUSE();
  // Only the last one needs to wake the others; of two who come at once, at least one sees both.
  if (region_.shared().sleepers.load(std::memory_order_seq_cst) != 0 && all_at(step_)) wake();
}

void Meeting::tell() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (region_.shared().sleepers.load(std::memory_order_seq_cst) != 0) wake();
}

void Meeting::wake() {
  LOCKSTEP_SHM_PAUSE();
  region_.shared().epoch.fetch_add(1, std::memory_order_release);
  futex_wake_all(region_.shared().epoch);
}

void Meeting::interrupt(const std::string& cause) {
  {
    std::lock_guard lock(mutex_);
    if (cause_.empty()) cause_ = cause;
  }
  interrupted_.store(true, std::memory_order_release);
  wake();
}

void Meeting::leave() {
  std::uint32_t here = Line::kHere;
  region_.line(rank_).presence.compare_exchange_strong(here, Line::kLeft);
  wake();
}

void Meeting::gave_up(int rank) const {
  throw PeerLost(rank, fmt::format("rank {} has given the operation up", rank));
}

std::exception_ptr Meeting::look_around(Clock::time_point deadline) const {
  if (interrupted_.load(std::memory_order_acquire)) {
    std::lock_guard lock(mutex_);
    return std::make_exception_ptr(Interrupted(cause_));
  }
  for (int r = 0; r < ranks(); ++r) {
    Line& line = region_.line(r);
    if (r == rank_) continue;
    // Held by a thread that lives as long as its process: it can be had only when that has ended. Whoever
    // gets it lets it go without mending it, which says the same to all the others.
    const int held = ::pthread_mutex_trylock(&line.alive);
    if (held == 0 || held == EOWNERDEAD) ::pthread_mutex_unlock(&line.alive);
    if (held == EOWNERDEAD || held == ENOTRECOVERABLE)
      return std::make_exception_ptr(PeerLost(r, fmt::format("rank {} has ended", r)));
    const auto presence = line.presence.load(std::memory_order_acquire);
    if (presence != Line::kHere && line.arrived.load(std::memory_order_acquire) < step_)
      return std::make_exception_ptr(
          PeerLost(r, fmt::format("rank {} has {}", r,
                                  presence == Line::kLeft ? "left the group" : "given the operation up")));
  }
  if (Clock::now() >= deadline) return std::make_exception_ptr(TimedOut("the deadline has passed"));
  return nullptr;
}

std::string Meeting::absent() const {
  std::vector<int> missing;
  for (int r = 0; r < ranks(); ++r)
    if (region_.line(r).arrived.load(std::memory_order_acquire) < step_) missing.push_back(r);
  if (missing.empty()) return {};
  return fmt::format("rank{} {} {} not come", missing.size() > 1 ? "s" : "", fmt::join(missing, ", "),
                     missing.size() > 1 ? "have" : "has");
}

}  // namespace lockstep::shm

#include <lockstep/base/text.h>
#include <lockstep/comm/group/connect_barrier.h>

#include <algorithm>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/awake_clock.h>
#include <lockstep/comm/c10d/store.h>

namespace lockstep::detail {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFirstLook(1), kPollInterval(50);
// How long a rank stays ready to enter: its other threads need the lock.
constexpr milliseconds kReady(20);
constexpr const char *kMet = "met", *kGo = "go", *kFree = "free";

std::string key_of(const std::string& who, const std::string& what) {
  return fmt::format("first/{}/{}", who, what);
}
std::string pair_of(int a, int b) { return fmt::format("{}-{}", std::min(a, b), std::max(a, b)); }

// Returns the value after the exchange.
std::string exchange(c10d::Store& store, const std::string& key, const std::string& expected,
                     const std::string& desired) {
  const auto stands = store.compareSet(key, bytes_of(expected), bytes_of(desired));
  return {stands.begin(), stands.end()};
}

}  // namespace

// The first outcome wins and applies to all ranks, so no rank enters if another gave up.
void ConnectBarrier::settle(const std::string& who, const std::string& outcome) {
  exchange(*store_, key_of(who, "outcome"), "", outcome);
}

bool ConnectBarrier::arrive(const std::string& who, std::optional<int> peer, milliseconds limit,
                            c10::function_ref<bool()> stopped) {
  bool first = false;
  {
    std::lock_guard lock(mutex_);
    first = arrived_.insert(peer).second;
  }
  const int wanted = peer ? 2 : size_;
  if (first) {
    put(*store_, key_of(who, std::to_string(rank_)), "here");
    if (store_->add(key_of(who, "count"), 1) == wanted) settle(who, kMet);
  }
  const auto deadline = AwakeClock::now() + limit;
  for (auto nap = kFirstLook; !store_->check({key_of(who, "outcome")});
       nap = std::min(2 * nap, kPollInterval)) {
    const bool late = AwakeClock::now() >= deadline;
    if (late || stopped()) {
      settle(who, fmt::format("rank {} gave up", rank_));
      break;
    }
    std::this_thread::sleep_for(nap);
  }
  return take(*store_, key_of(who, "outcome")) == kMet;
}

bool ConnectBarrier::await(std::optional<int> peer, milliseconds limit, c10::function_ref<void(bool)> waits,
                           c10::function_ref<bool()> stopped) {
  if (size_ == 1) return false;
  {
    std::lock_guard lock(mutex_);
    if (met_.contains(peer)) return false;
  }
  const auto who = peer ? pair_of(rank_, *peer) : "all";
  bool met = false;
  waits(true);
  try {
    met = arrive(who, peer, limit, stopped);
  } catch (...) {
    waits(false);
    throw;
  }
  waits(false);
  if (met) {
    std::lock_guard lock(mutex_);
    return met_.insert(peer).second;
  }
  std::vector<int> missing;
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && (!peer || r == *peer) && !store_->check({key_of(who, std::to_string(r))}))
      missing.push_back(r);
  const auto* operation = peer ? "the first message between these ranks" : "the first operation of the group";
  if (missing.empty())
    throw NotMet(CommError::Kind::peer_died, fmt::format("all ranks reached {}, but {} before that",
                                                         operation, take(*store_, key_of(who, "outcome"))));
  throw NotMet(CommError::Kind::deadline,
               fmt::format("{} {} not reached {} within {:.3f} s", ranks_text(missing),
                           missing.size() == 1 ? "has" : "have", operation,
                           std::chrono::duration<double>(limit).count()));
}

bool ConnectBarrier::has_entered(int peer) {
  std::lock_guard lock(mutex_);
  return entered_.contains(peer);
}

bool ConnectBarrier::enter(int peer) {
  if (has_entered(peer)) return true;
  const auto key = key_of(pair_of(rank_, peer), "entry");
  const auto mine = std::to_string(rank_), theirs = std::to_string(peer);
  auto stands = exchange(*store_, key, "", kFree);
  if (stands == theirs) stands = exchange(*store_, key, theirs, kGo);
  if (stands == kFree) stands = exchange(*store_, key, kFree, mine);
  const auto until = AwakeClock::now() + kReady;
  while (stands == mine && AwakeClock::now() < until) {
    std::this_thread::sleep_for(kFirstLook);
    stands = take(*store_, key);
  }
  // Withdraw, unless the peer has entered meanwhile.
  if (stands == mine) stands = exchange(*store_, key, mine, kFree);
  if (stands != kGo) return false;
  std::lock_guard lock(mutex_);
  entered_.insert(peer);
  return true;
}

}  // namespace lockstep::detail

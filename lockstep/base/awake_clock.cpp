#include <lockstep/base/awake_clock.h>

#include <pthread.h>
#include <sys/prctl.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <system_error>
#include <thread>

#include <lockstep/base/quiet_threads.h>

namespace lockstep::detail {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr nanoseconds kBeat = milliseconds(100);
// A thread that is later than this has been stopped, not merely waiting for a core.
constexpr nanoseconds kLate = milliseconds(500);
// Value of the last beat while no thread beats, so that nothing can be missed.
constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

std::int64_t steady() { return nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// A thread that records ten times a second that the process runs, because the kernel does not count stopped
// time.
class Heart {
 public:
  static Heart& get() {
    static auto* heart = new Heart;  // Never destroyed, because its thread never ends.
    return *heart;
  }

  std::int64_t awake(std::int64_t now) const {
    // In this order: if a stop is recorded in between, it may briefly be counted twice, but is never missed.
    const auto beat = last_.load(std::memory_order_acquire);
    const auto stopped = stopped_.load(std::memory_order_acquire);
    return now - stopped - missed(beat, now);
  }

 private:
  Heart() {
    const QuietThreads quiet;
    try {
      std::thread([this] { run(); }).detach();
      last_ = steady();
      // The thread does not exist in the child.
      ::pthread_atfork(nullptr, nullptr, [] { get().last_ = kNever; });
    } catch (const std::system_error&) {
      // No more threads: stopped time then counts.
    }
  }

  static std::int64_t missed(std::int64_t beat, std::int64_t now) {
    return beat != kNever && now - beat > kLate.count() ? now - beat - kBeat.count() : 0;
  }

  void run() {
    ::prctl(PR_SET_NAME, "lockstep-clock");
    for (;;) {
      std::this_thread::sleep_for(kBeat);
      const auto now = steady();
      const auto before = last_.load(std::memory_order_relaxed);
      stopped_.fetch_add(missed(before, now), std::memory_order_release);
      last_.store(now, std::memory_order_release);
    }
  }

  std::atomic<std::int64_t> last_{kNever}, stopped_{0};
};

}  // namespace

AwakeClock::time_point AwakeClock::now() noexcept { return moment().awake; }

AwakeClock::Moment AwakeClock::moment() noexcept {
  const Heart& heart = Heart::get();  // First: the first call starts the beat.
  const auto now = std::chrono::steady_clock::now();
  return {time_point(nanoseconds(heart.awake(nanoseconds(now.time_since_epoch()).count()))), now};
}

}  // namespace lockstep::detail

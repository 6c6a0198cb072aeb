// A time limit for tests on a machine that may be busy.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

namespace lockstep::testing {

// A limit that counts from construction. It applies unchanged on a quiet machine; on a busy one, 30 s apply
// instead, and the test's output says so. While the object exists, a thread reads the clock continuously: a
// gap between two readings is time in which that thread had no core. The machine is busy if the gaps are more
// than a tenth of the time.
class QuietLimit {
 public:
  using Clock = std::chrono::steady_clock;

  explicit QuietLimit(Clock::duration limit)
      : limit_(limit), begin_(Clock::now()), last_(since_begin()), thread_([this] { watch(); }) {}
  ~QuietLimit() {
    over_ = true;
    thread_.join();
  }
  QuietLimit(const QuietLimit&) = delete;
  QuietLimit& operator=(const QuietLimit&) = delete;

  Clock::time_point begin() const { return begin_; }
  // True if an event that ended at `end`, not long ago, is within the limit.
  bool met_at(Clock::time_point end) const {
    const auto took = end - begin_;
    const Clock::duration lost(lost_ + gap(since_begin() - last_));
    if (took < limit_) return true;
    if (10 * lost <= took) return false;
    using Seconds = std::chrono::duration<double>;
    std::printf(
        "QuietLimit: took %.2f s of %.2f s, but this thread had no processor for %.2f s: the limit is 30 s\n",
        Seconds(took).count(), Seconds(limit_).count(), Seconds(lost).count());
    return took < std::chrono::seconds(30);
  }

 private:
  using Ticks = Clock::rep;

  Ticks since_begin() const { return (Clock::now() - begin_).count(); }
  // Reading the clock takes far less than 1 ms.
  static Ticks gap(Ticks between) {
    return Clock::duration(between) > std::chrono::milliseconds(1) ? between : 0;
  }
  void watch() {
    while (!over_) {
      const auto now = since_begin();
      lost_ += gap(now - last_);
      last_ = now;
    }
  }

  const Clock::duration limit_;
  const Clock::time_point begin_;
  std::atomic<Ticks> lost_ = 0, last_;
  std::atomic<bool> over_ = false;
  std::thread thread_;  // Last member, because it uses the others.
};

}  // namespace lockstep::testing

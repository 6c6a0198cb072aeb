// The part of a rank's page with its step times and latest metrics, and the timer that measures them in the
// rank.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string_view>
#include <thread>
#include <vector>

#include <lockstep/control/board/steps.h>

namespace lockstep::control {

// In shared memory, initially zero. One writer; readers may find any value.
class StepRecord {
 public:
  void add(const StepTime& time);
  // Keeps the first few names, and always "loss" and "samples".
  void metric(std::string_view name, double value, std::int64_t step);

  // The latest step times after the first `seen` ones; updates `seen`.
  std::vector<StepTime> times(std::uint64_t& seen) const;
  std::vector<Metric> metrics() const;

 private:
  static constexpr std::size_t kTimes = 16, kMetrics = 6, kName = 24;
  struct Time {
    std::atomic<std::int64_t> step, steps, took_us, waited_us;
  };
  struct Slot {
    std::atomic<std::uint64_t> used;  // The name is set, and stays.
    std::atomic<char> name[kName];
    std::atomic<double> value;
    std::atomic<std::int64_t> step;
  };

  std::atomic<std::uint64_t> count_;  // Number of times ever added.
  Time times_[kTimes];
  Slot metrics_[kMetrics];
};

// Times the steps and waits of one thread, the one that calls step(). Has no clock: callers pass times in ns.
class StepTimer {
 public:
  bool is_of_this_thread() const { return thread_ == std::this_thread::get_id(); }
  bool is_waiting() const { return waits_since_ >= 0; }
  void waits(std::int64_t now) { waits_since_ = now; }
  void waited(std::int64_t now);
  // `step` begins. Returns what is to be reported of the steps before it. Short steps are reported several at
  // a time, always up to a multiple of a power of two, so that all ranks report the same ones; a step that
  // takes much longer is reported by itself.
  using Times = std::array<std::optional<StepTime>, 2>;
  Times step(std::int64_t step, std::int64_t now);

 private:
  StepTime tell(std::int64_t last, std::int64_t until, std::int64_t waited);

  std::thread::id thread_;
  std::int64_t step_ = -1, before_ = -1;  // The step in progress, and the one before it.
  std::int64_t begun_ = 0, last_ = 0;     // Start of the unreported steps, and of the current one.
  std::int64_t steps_ = 0;                // Number of steps that have ended and are unreported.
  std::int64_t usual_ = 0;                // Usual time of a step.
  std::int64_t waits_since_ = -1;
  std::int64_t waited_ = 0;         // Wait in the unreported steps.
  std::int64_t waited_before_ = 0;  // The same without the step in progress.
};

}  // namespace lockstep::control

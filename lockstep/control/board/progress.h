// The part of a rank's page that tells how its steps went, and its last metrics; and the watch by which the
// rank knows.
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

// In shared memory, all zeros at first. One writes; whoever reads may find any value there.
class StepRecord {
 public:
  void add(const StepTime& time);
  // The first few names are kept, and "loss" and "samples" always.
  void metric(std::string_view name, double value, std::int64_t step);

  // Those of the last that are newer than the `seen` first ones; `seen` then counts them too.
  std::vector<StepTime> times(std::uint64_t& seen) const;
  std::vector<Metric> metrics() const;

 private:
  static constexpr std::size_t kTimes = 16, kMetrics = 6, kName = 24;
  struct Time {
    std::atomic<std::int64_t> step, steps, took_us, waited_us;
  };
  struct Slot {
    std::atomic<std::uint64_t> used;  // the name is there, and stays
    std::atomic<char> name[kName];
    std::atomic<double> value;
    std::atomic<std::int64_t> step;
  };

  std::atomic<std::uint64_t> count_;  // of all that were ever added
  Time times_[kTimes];
  Slot metrics_[kMetrics];
};

// The steps of one thread, the one that calls step(), and its waits. No clock: times come from outside, in
// ns.
class StepTimer {
 public:
  bool is_of_this_thread() const { return thread_ == std::this_thread::get_id(); }
  bool is_waiting() const { return waits_since_ >= 0; }
  void waits(std::int64_t now) { waits_since_ = now; }
  void waited(std::int64_t now);
  // `step` begins: what there is to tell of those before it. Short steps are told several at a time, always
  // up to a multiple of a power of two, so that ranks tell of the same ones; one that takes much longer is
  // told by itself.
  using Times = std::array<std::optional<StepTime>, 2>;
  Times step(std::int64_t step, std::int64_t now);

 private:
  StepTime tell(std::int64_t last, std::int64_t until, std::int64_t waited);

  std::thread::id thread_;
  std::int64_t step_ = -1, before_ = -1;  // the one that is under way
  std::int64_t begun_ = 0, last_ = 0;     // what has not been told; the step
  std::int64_t steps_ = 0;                // that have ended and have not been told
  std::int64_t usual_ = 0;                // how long a step takes
  std::int64_t waits_since_ = -1;
  std::int64_t waited_ = 0,
               waited_before_ = 0;  // in what has not been told; without the step that is under way
};

}  // namespace lockstep::control

// Wrapper of Kineto, LibTorch's own profiler. A process has only one.
#pragma once

#include <optional>
#include <string>

#include <lockstep/profile/record/activities.h>

namespace lockstep::profile {

class Kineto {
 public:
  enum class Of { operators, operators_and_cuda };

  // Starts recording operators of all threads, and CUDA devices' activities. Returns an error text on
  // failure. The first use with CUDA in a process takes seconds.
  std::optional<std::string> start(Of what) noexcept;
  bool running() const noexcept { return running_; }
  // Stops recording; may be called on any thread. Logs an error and returns nullopt on failure.
  std::optional<Activities> stop() noexcept;
  // Converts clocks, calibrated at start() and stop().
  EpochClock clock() const { return {first_, last_}; }

 private:
  bool running_ = false;
  ClockPair first_, last_;
};

// True if this process computes on a device that Kineto records.
bool uses_cuda() noexcept;

}  // namespace lockstep::profile

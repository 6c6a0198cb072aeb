// LibTorch's own profiler, of which a process has one.
#pragma once

#include <optional>
#include <string>

#include <lockstep/profile/record/activities.h>

namespace lockstep::profile {

class Kineto {
 public:
  enum class Of { operators, operators_and_cuda };

  // Records operators of all threads, and what CUDA's devices do, from here on; or says why it cannot.
  // Where CUDA is recorded for the first time in a process, it takes seconds.
  std::optional<std::string> start(Of what) noexcept;
  bool running() const noexcept { return running_; }
  // Any thread. Nothing where it failed, which it has told of.
  std::optional<Activities> stop() noexcept;
  // From when it started to when it stopped.
  EpochClock clock() const { return {first_, last_}; }

 private:
  bool running_ = false;
  ClockPair first_, last_;
};

// Whether this process computes on a device that Kineto records.
bool uses_cuda() noexcept;

}  // namespace lockstep::profile

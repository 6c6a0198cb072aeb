// Kineto's recording of this process, in a form without LibTorch, and its conversion to a rank's profile.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <lockstep/profile/record/rank_profile.h>

namespace lockstep::profile {

// Times are nanoseconds since the epoch; threads are the system's IDs (gettid).
struct OperatorActivity {
  std::string name;
  std::int64_t thread = 0, begin = 0, end = 0;
  std::uint64_t correlation = 0;
};
// A runtime call that launched work on a device.
struct LaunchActivity {
  std::int64_t thread = 0, begin = 0;
  std::uint64_t correlation = 0;  // of the launched work
};
struct DeviceActivity {
  DeviceKind kind{};
  std::string name;
  int device = 0;
  std::int64_t stream = 0, begin = 0, end = 0;
  std::uint64_t correlation = 0;  // of its launch; 0: unknown
  std::uint64_t linked = 0;       // of the operator that launched it; 0: unknown
};
struct Activities {
  std::vector<OperatorActivity> operators;
  std::vector<LaunchActivity> launches;
  std::vector<DeviceActivity> device;
};

// The same moment on both clocks, in nanoseconds.
struct ClockPair {
  std::int64_t steady = 0, epoch = 0;
};
ClockPair clock_pair() noexcept;

// Converts epoch time to steady time by interpolating between two pairs, because the epoch clock may be
// slewed.
class EpochClock {
 public:
  EpochClock(ClockPair first, ClockPair last);
  std::int64_t steady(std::int64_t epoch) const;

 private:
  ClockPair first_;
  double rate_ = 1;
};

// Adds operators as spans of their threads, like those from callbacks but without CPU times. Omits those that
// began before the window. Nests the spans of each thread.
void add_operators(RankProfile& profile, const Activities& activities, const EpochClock& clock);

// Adds device activities and, where known, when and on which thread each was launched, inside a span of that
// thread. Omits those that began before or after the window.
void add_device(RankProfile& profile, const Activities& activities, const EpochClock& clock);

}  // namespace lockstep::profile

// What LibTorch's own profiler (Kineto) recorded of this process, in a form without LibTorch, and how it
// becomes a part of a rank's profile.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <lockstep/profile/record/rank_profile.h>

namespace lockstep::profile {

// Times are nanoseconds since the epoch, threads those of the system (gettid).
struct OperatorActivity {
  std::string name;
  std::int64_t thread = 0, begin = 0, end = 0;
  std::uint64_t correlation = 0;
};
// A call that gave a device something to do.
struct LaunchActivity {
  std::int64_t thread = 0, begin = 0;
  std::uint64_t correlation = 0;  // of what it launched
};
struct DeviceActivity {
  DeviceKind kind{};
  std::string name;
  int device = 0;
  std::int64_t stream = 0, begin = 0, end = 0;
  std::uint64_t correlation = 0;  // of its launch; 0: not known
  std::uint64_t linked = 0;       // of the operator that launched it; 0: not known
};
struct Activities {
  std::vector<OperatorActivity> operators;
  std::vector<LaunchActivity> launches;
  std::vector<DeviceActivity> device;
};

// The same moment by both clocks, in nanoseconds.
struct ClockPair {
  std::int64_t steady = 0, epoch = 0;
};
ClockPair clock_pair() noexcept;

// From the epoch's clock to the steady one, between two pairs: the former may be slewed meanwhile.
class EpochClock {
 public:
  EpochClock(ClockPair first, ClockPair last);
  std::int64_t steady(std::int64_t epoch) const;

 private:
  ClockPair first_;
  double rate_ = 1;
};

// Adds operators as spans of their threads, as callbacks would have had them, without processor times.
// Those that began before the window are left out. Spans of a thread are nested afterwards.
void add_operators(RankProfile& profile, const Activities& activities, const EpochClock& clock);

// Adds what devices did, and, where that can be had, when which thread launched it: inside a span of that
// thread. What began before or after the window is left out.
void add_device(RankProfile& profile, const Activities& activities, const EpochClock& clock);

}  // namespace lockstep::profile

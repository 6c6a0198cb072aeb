// Processor time: unlike wall-clock time, it does not depend on the load of the machine.
#pragma once

#include <time.h>

#include <chrono>

namespace lockstep::testing {

// Processor time used by the calling thread.
inline std::chrono::nanoseconds thread_processor_time() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

}  // namespace lockstep::testing

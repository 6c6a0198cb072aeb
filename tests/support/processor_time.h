// Processor time: unlike the time of day, it does not depend on what else the machine does.
#pragma once

#include <time.h>

#include <chrono>

namespace lockstep::testing {

// Processor time that the calling thread has used.
inline std::chrono::nanoseconds thread_processor_time() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

}  // namespace lockstep::testing

// A clock that does not advance while this process is stopped (Ctrl-Z, SIGSTOP, a debugger), so that its
// deadlines do not pass meanwhile. Works with std::condition_variable::wait_until and similar functions.
#pragma once

#include <chrono>

namespace lockstep::detail {

struct AwakeClock {
  using duration = std::chrono::nanoseconds;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<AwakeClock>;
  static constexpr bool is_steady = false;  // May go back by the stopped time, once it is found.

  static time_point now() noexcept;

  // One reading of both clocks.
  struct Moment {
    time_point awake;
    std::chrono::steady_clock::time_point steady;
  };
  static Moment moment() noexcept;
};

}  // namespace lockstep::detail

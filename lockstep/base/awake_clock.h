// A clock that stands still while this process is stopped (Ctrl-Z, SIGSTOP, a debugger): a deadline of it
// does not pass meanwhile. Good for std::condition_variable::wait_until and its like.
#pragma once

#include <chrono>

namespace lockstep::detail {

struct AwakeClock {
  using duration = std::chrono::nanoseconds;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<AwakeClock>;
  static constexpr bool is_steady = false;  // may go back by as much as is found to have been missed

  static time_point now() noexcept;

  // One look at the time, for whoever needs it on both.
  struct Moment {
    time_point awake;
    std::chrono::steady_clock::time_point steady;
  };
  static Moment moment() noexcept;
};

}  // namespace lockstep::detail

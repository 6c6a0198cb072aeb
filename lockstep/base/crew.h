// Threads beside a program's own. Who must be without them, as what they touch may go with the process, waits
// until they have ended, what they keep for themselves (thread_local) included.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

namespace lockstep::detail {

class Crew {
 public:
  Crew();
  // On a thread of its own, which takes no signals. False where no more threads can be had.
  bool start(std::function<void()> body);
  // Until all but the calling one have ended and let go of what their bodies held; false at the limit, which
  // counts for the bodies alone: what threads keep for themselves is given up without one.
  bool wait(std::chrono::milliseconds limit) const;

 private:
  struct State;  // which threads have a share of: a Crew may go before them
  const std::shared_ptr<State> state_;
};

}  // namespace lockstep::detail

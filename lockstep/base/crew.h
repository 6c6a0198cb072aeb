// Threads that nobody joins. Who must, as what they touch may go with the process, waits until they have
// ended.
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
  // Until all but the calling one have ended and let go of what their bodies held; false at the limit.
  bool wait(std::chrono::milliseconds limit) const;

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace lockstep::detail

// Background threads of the library. Code that must run without them, for example because they use memory
// that is about to be freed, waits until they have ended, including their thread_local objects.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

namespace lockstep::detail {

class Crew {
 public:
  Crew();
  // Runs the body on a new thread that receives no signals. False if no thread can be created.
  bool start(std::function<void()> body);
  // Waits until all threads except the calling one have ended and destroyed their bodies. False at the limit,
  // which applies to the bodies only: thread_local objects are waited for without one.
  bool wait(std::chrono::milliseconds limit) const;

 private:
  struct State;  // Shared with the threads, because a Crew may be destroyed before them.
  const std::shared_ptr<State> state_;
};

}  // namespace lockstep::detail

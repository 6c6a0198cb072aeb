// Waits for what another thread or process does.
#pragma once

#include <chrono>
#include <thread>

namespace lockstep::testing {

// Polls until the condition is true. Returns false at the limit, which is only there to end a test that
// hangs.
template <typename Condition>
bool eventually(Condition&& condition, std::chrono::seconds limit = std::chrono::seconds(60)) {
  for (const auto end = std::chrono::steady_clock::now() + limit; !condition();) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace lockstep::testing

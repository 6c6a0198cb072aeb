// Waits for the effect of another thread or process.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace lockstep::testing {

// Polls until the condition is true, every millisecond at first and every 10 ms in the end. Returns false at
// the limit, which only ends a test that hangs.
template <typename Condition>
bool eventually(Condition&& condition, std::chrono::seconds limit = std::chrono::seconds(60)) {
  constexpr std::chrono::milliseconds kLongestPause(10);
  const auto end = std::chrono::steady_clock::now() + limit;
  for (std::chrono::milliseconds pause(1); !condition(); pause = std::min(2 * pause, kLongestPause)) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(pause);
  }
  return true;
}

}  // namespace lockstep::testing

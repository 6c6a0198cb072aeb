// What happens to shared memory in a process forked from one that uses it.
#pragma once

#include <cstdint>
#include <mutex>

namespace lockstep::shm {

// Different in every child that is forked after the first call.
std::uint64_t fork_generation();

// The instance of this process, never destroyed. A forked child makes a new one, because it does not have the
// threads of the parent's.
template <typename Thing, typename Make>
Thing& of_this_process(Make make) {
  static std::mutex mutex;
  static Thing* thing = nullptr;
  static std::uint64_t made_in = 0;
  std::lock_guard lock(mutex);
  if (thing == nullptr || made_in != fork_generation()) {
    thing = make();
    made_in = fork_generation();
  }
  return *thing;
}

}  // namespace lockstep::shm

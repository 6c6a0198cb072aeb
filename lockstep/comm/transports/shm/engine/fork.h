// What becomes of shared memory in a process that is forked from one that has it.
#pragma once

#include <cstdint>
#include <mutex>

namespace lockstep::shm {

// Another number in every child that is forked after the first call.
std::uint64_t fork_generation();

// The one of this process, which is never destroyed; what needs a thread has none in a child, which makes its
// own.
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

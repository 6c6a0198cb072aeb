// Whether a rank was killed for want of memory: the kernel says so only in its counters.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

namespace lockstep::detail {

class OutOfMemory {
 public:
  OutOfMemory() { begin(); }
  void begin();  // what happened before does not count
  // For a rank that has just been killed: "out of memory: ...", or nothing.
  std::string note() const;

 private:
  mutable std::mutex mutex_;  // the agent asks too, from its thread
  std::optional<std::uint64_t> of_cgroup_, of_system_;
};

}  // namespace lockstep::detail

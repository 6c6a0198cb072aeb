// Determines whether a rank was killed because memory ran out, which the kernel reports only in its counters.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

namespace lockstep::detail {

class OutOfMemory {
 public:
  OutOfMemory() { begin(); }
  void begin();  // Ignores earlier kills.
  // For a rank that has just been killed: "out of memory: ...", or empty.
  std::string note() const;

 private:
  mutable std::mutex mutex_;  // The agent calls note() from its own thread.
  std::optional<std::uint64_t> of_cgroup_, of_system_;
};

}  // namespace lockstep::detail

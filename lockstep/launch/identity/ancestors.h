// The processes above this one: variables are inherited from every launcher around us, but only one of them
// is the nearest.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::detail {

struct Process {
  int pid = 0;
  std::string name;         // at most 15 characters; the kernel keeps no more
  std::uint64_t start = 0;  // in the kernel's ticks since boot: with the pid, of one process alone
  std::string title;        // its arguments, or what it has put in their place, each followed by a blank
};

// The parent first. Ends where /proc does: at the outermost process of a container.
std::vector<Process> ancestors();

}  // namespace lockstep::detail

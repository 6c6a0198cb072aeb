// The ancestors of this process. Environment variables are inherited from every enclosing launcher, but only
// one launcher is the nearest.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::detail {

struct Process {
  int pid = 0;
  std::string name;         // At most 15 characters; the kernel keeps no more.
  std::uint64_t start = 0;  // In kernel ticks since boot; unique together with the pid.
  std::string title;        // Its arguments, or the title it has set, each followed by a blank.
};

// Parent first. Ends where /proc ends: at the outermost process of a container.
std::vector<Process> ancestors();

}  // namespace lockstep::detail

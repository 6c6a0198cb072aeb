// Locks that the forking thread holds during fork(), so that the data they guard is consistent in the child.
#pragma once

#include <mutex>

namespace lockstep::memory {

// outer: locks whose holder may take an inner one.
enum class ForkOrder { outer, inner };
void hold_in_fork(std::mutex& mutex, ForkOrder order);  // The mutex must never be destroyed.

}  // namespace lockstep::memory

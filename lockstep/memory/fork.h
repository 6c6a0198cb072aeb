// Locks that a forking thread holds while the process is copied, so that what they guard is whole in the
// child.
#pragma once

#include <mutex>

namespace lockstep::memory {

// outer: taken by those who may take an inner one while they have it.
enum class ForkOrder { outer, inner };
void hold_in_fork(std::mutex& mutex, ForkOrder order);  // which is never destroyed

}  // namespace lockstep::memory

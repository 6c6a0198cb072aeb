// Finds and ends the descendants of this process.
//
// A process started by a rank may leave its process group, its session and its parent. It cannot escape an
// ancestor that is a subreaper (PR_SET_CHILD_SUBREAPER), because orphans become the subreaper's children.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <vector>

namespace lockstep::detail {

// Throws ConfigError if /proc is missing or of another pid namespace, where pids belong to unrelated
// processes.
void check_proc();

std::vector<pid_t> children(pid_t pid);

// The live descendants at every depth, except those in `spare` and their descendants.
std::vector<pid_t> descendants(const std::vector<pid_t>& spare = {});

// Ends all descendants. They are stopped first, so that none can start another one meanwhile. Calls `reap`
// repeatedly to wait for children. Returns those that did not end within the limit, because they belong to
// another user or are blocked inside the kernel.
std::vector<pid_t> end_descendants(std::chrono::milliseconds limit, const std::function<void()>& reap,
                                   const std::vector<pid_t>& spare = {});

}  // namespace lockstep::detail

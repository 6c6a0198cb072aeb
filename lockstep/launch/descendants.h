// The processes that stem from this one, and their end.
//
// What a rank starts may leave its process group, its session and its parent. It cannot leave a process that
// is a subreaper (PR_SET_CHILD_SUBREAPER): orphans become that one's children.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <vector>

namespace lockstep::detail {

// ConfigError where /proc is missing or of another pid namespace: its numbers are those of strangers then.
void check_proc();

std::vector<pid_t> children(pid_t pid);

// Those that live, at every depth. Those in `spare` are left out, with what stems from them.
std::vector<pid_t> descendants(const std::vector<pid_t>& spare = {});

// Ends all of them. They are stopped first, so that none can start another meanwhile. `reap` is called now
// and then to wait for children. Returns those that have not ended within the limit: of another user, or
// inside the kernel.
std::vector<pid_t> end_descendants(std::chrono::milliseconds limit, const std::function<void()>& reap,
                                   const std::vector<pid_t>& spare = {});

}  // namespace lockstep::detail

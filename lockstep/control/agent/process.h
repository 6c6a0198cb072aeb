// What /proc says of a process: whether it runs, is stopped, or how it is ending.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <lockstep/control/wire/failure.h>

namespace lockstep::control {

struct ProcessState {
  char state = '?';     // as in /proc/PID/stat: R, S, D, T (stopped), t (held by a debugger), Z, X
  bool ending = false;  // it will not run its program any further
  int code = 0;         // as wait() would tell; right only when ending
  int tracer = 0;       // pid of the debugger that holds it
  int parent = 0;
  std::uint64_t start = 0;  // in the kernel's ticks since boot: with the pid, of one process alone
  std::string name = {};    // at most 15 characters; the kernel keeps no more
};

// What stands in /proc/PID/FILE; empty: there is no such process, or it ends this moment.
std::string proc_text(int pid, const char* file);

std::optional<ProcessState> look_at(int pid);  // nothing: there is no such process

// Whether some thread of the process does something of its own at this moment: it runs, reads, sleeps for a
// time. Idle are those that wait for a lock, a condition, a signal or a connection, and those whose name begins
// with "lockstep-". False where the kernel does not tell what threads wait for.
bool has_active_thread(int pid);

// How it ended or is ending, from one look; only the pid where that is not to be known.
Ended how_it_ended(int pid, const std::optional<ProcessState>& process);

}  // namespace lockstep::control

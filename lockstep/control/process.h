// What /proc says of a process: whether it runs, is stopped, or how it is ending.
#pragma once

#include <optional>

#include <lockstep/control/failure.h>

namespace lockstep::control {

struct ProcessState {
  char state = '?';     // as in /proc/PID/stat: R, S, D, T (stopped), t (held by a debugger), Z, X
  bool ending = false;  // it will not run its program any further
  int code = 0;         // as wait() would tell; right only when ending
  int tracer = 0;       // pid of the debugger that holds it
};

std::optional<ProcessState> look_at(int pid);  // nothing: there is no such process

// How it ended or is ending, from one look; only the pid where that is not to be known.
Ended how_it_ended(int pid, const std::optional<ProcessState>& process);

}  // namespace lockstep::control

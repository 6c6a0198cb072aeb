// The state of a process according to /proc: running, stopped, or how it is ending.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <lockstep/control/wire/failure.h>

namespace lockstep::control {

struct ProcessState {
  char state = '?';     // as in /proc/PID/stat: R, S, D, T (stopped), t (held by a debugger), Z, X
  bool ending = false;  // The process will not execute its program any further.
  int code = 0;         // As from wait(); valid only if `ending`.
  int tracer = 0;       // Pid of the debugger that holds it.
  int parent = 0;
  std::uint64_t start = 0;  // In kernel ticks since boot; unique together with the pid.
  std::string name = {};    // At most 15 characters; the kernel keeps no more.
};

// The content of /proc/PID/FILE; empty if the process does not exist or is ending.
std::string proc_text(int pid, const char* file);

std::optional<ProcessState> look_at(int pid);  // nullopt if there is no such process.

// True if some thread of the process is active: it runs, reads or sleeps for a time. Threads are idle if they
// wait for a lock, a condition, a signal or a connection, or if their name begins with "lockstep-". False if
// the kernel hides what threads wait for.
bool has_active_thread(int pid);

// How it ended or is ending, from one look; only the pid if that is not known.
Ended how_it_ended(int pid, const std::optional<ProcessState>& process);

}  // namespace lockstep::control

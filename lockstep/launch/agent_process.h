// The process "lockstep-agent", between `lockstep run` and the ranks: it has the host's agent, starts the
// ranks, shows their output, waits for them and ends what they leave behind. It outlives a launcher that is
// killed, by as long as it takes to end every process that stems from it; the launcher does the same for it.
#pragma once

#include <csignal>

#include <lockstep/launch/options.h>
#include <lockstep/os/socket.h>

namespace lockstep::detail {

// Between the two, over a socket that keeps messages apart.
struct Message {
  // From the launcher: signal, pause, resume. To it: paused, and input, when a rank here reads what is typed.
  enum class Kind { signal, pause, resume, paused, input } kind{};
  int signal = 0;  // that the launcher got
};

struct Inherited {
  control::Fd launcher;  // ends when it does
  int stdin_fd = -1;     // for the rank that has a standard input; -1: none has
  sigset_t signals{};    // blocked when the launcher was started: the ranks' mask
};

// Called in a new process that is one of the launcher's; returns its exit status.
int guard(const LaunchOptions& options, Inherited inherited);

}  // namespace lockstep::detail

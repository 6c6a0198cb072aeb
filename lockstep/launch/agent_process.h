// The process "lockstep-agent", between `lockstep run` and the ranks. It runs the host's agent, starts the
// ranks, shows their output, waits for them and ends their leftover descendants. If the launcher is killed,
// this process ends all its descendants and exits; the launcher does the same for it.
#pragma once

#include <csignal>

#include <lockstep/launch/options.h>
#include <lockstep/os/socket.h>

namespace lockstep::detail {

// Messages between the two, over a socket that preserves message boundaries.
struct Message {
  // From the launcher: signal, pause, resume. To it: paused, and input once a rank here reads terminal input.
  enum class Kind { signal, pause, resume, paused, input } kind{};
  int signal = 0;  // The signal that the launcher received.
};

struct Inherited {
  control::Fd launcher;  // Reaches end-of-file when the launcher ends.
  int stdin_fd = -1;     // Standard input for the rank that gets it; -1 if no rank does.
  sigset_t signals{};    // Signals blocked when the launcher was started: the ranks' mask.
};

// Runs in a new child process of the launcher. Returns its exit status.
int guard(const LaunchOptions& options, Inherited inherited);

}  // namespace lockstep::detail

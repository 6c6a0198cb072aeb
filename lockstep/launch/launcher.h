// Starts the ranks of a job on this host and stays with them until the last has ended.
//
//   lockstep (the person's: terminal, signals, standard input)
//     lockstep-agent (the agent process: the host's agent, output, waiting)
//       ranks, each in a session of its own, and what they start
//
// Either of the first two may be killed, or the second one stopped (SIGSTOP) for longer than --stop-grace: the
// other ends every process below.
#pragma once

#include <lockstep/launch/options.h>

namespace lockstep::detail {

// Returns the job's exit status: 0, that of the first failure, or 128 + a signal's number. What went wrong
// has been told on standard error.
int launch(const LaunchOptions& options);

}  // namespace lockstep::detail

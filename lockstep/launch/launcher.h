// Starts the ranks of a job on this host and waits until the last one has ended.
//
//   lockstep (in the foreground: terminal, signals, standard input)
//     lockstep-agent (the agent process: the host's agent, output, waiting)
//       ranks, each in its own session, and their descendants
//
// Either of the first two may be killed, or the agent process stopped (SIGSTOP) for longer than --stop-grace:
// the survivor then ends every process below.
#pragma once

#include <lockstep/launch/options.h>

namespace lockstep::detail {

// Returns the job's exit status: 0, the first failure's status, or 128 + a signal's number. Failures have
// been reported on standard error.
int launch(const LaunchOptions& options);

}  // namespace lockstep::detail

// Process-wide events: signals that ask the process to stop, uncaught exceptions, and saved checkpoints.
#pragma once

#include <memory>

#include <lockstep/control/client.h>

namespace lockstep::detail {

// From here on SIGTERM and SIGINT ask the job to stop; a second signal has its usual effect. Handlers that
// the program installed stay. The client, if there is one, notifies the other ranks.
void catch_stop_signals(const std::shared_ptr<control::Client>& client);
bool stop_signal_came();

// From here on, the text of an exception that ends this process is sent to the control plane first.
void tell_of_exceptions(const std::shared_ptr<control::Client>& client);

// Reports that a checkpoint was saved: a restarted job resumes after the steps that it holds.
void tell_of_checkpoint();

}  // namespace lockstep::detail

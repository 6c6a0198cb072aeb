// What concerns the process as a whole: signals that ask it to stop, exceptions that nobody catches,
// checkpoints that it has saved.
#pragma once

#include <memory>

#include <lockstep/control/client.h>

namespace lockstep::detail {

// From here on SIGTERM and SIGINT ask the job to stop; a second one has its usual effect. Handlers of the
// program's own stay. The client, where there is one, tells the others.
void catch_stop_signals(const std::shared_ptr<control::Client>& client);
bool stop_signal_came();

// The text of an exception that ends this process goes to the control plane first.
void tell_of_exceptions(const std::shared_ptr<control::Client>& client);

// A checkpoint has been saved: a job that is started again begins after the steps that it holds.
void tell_of_checkpoint();

}  // namespace lockstep::detail

#include "verbs.h"

namespace lockstep::cli {

void add_trace(CLI::App& app, Action& action) {
  auto* trace = app.add_subcommand("trace", "What was recorded of a run: put together, explained");
  trace->require_subcommand(1);
  add_trace_profile(*trace, action);
}

}  // namespace lockstep::cli

// One function per verb: adds it to the command line and sets what is to be done when it was chosen.
#pragma once

#include <functional>

#include <CLI/CLI.hpp>

namespace lockstep::cli {

using Action = std::function<int()>;  // the exit status

void add_run(CLI::App& app, Action& action);

}  // namespace lockstep::cli

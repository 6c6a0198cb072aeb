// One function per verb: adds it to the command line and sets what is to be done when it was chosen.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

namespace lockstep::cli {

using Action = std::function<int()>;  // the exit status

void add_run(CLI::App& app, Action& action);
void add_key(CLI::App& app, Action& action);
void add_doctor(CLI::App& app, Action& action);
void add_schedule(CLI::App& app, Action& action);
void add_trace(CLI::App& app, Action& action);

// What stands before the program in `run`'s arguments, as CLI11 takes it: torchrun's spellings become ours,
// and the "--" of `run -n 2 -- PROGRAM`, which CLI11 reads in another way, goes.
void tidy_run(const CLI::App& app, std::vector<std::string>& arguments);

}  // namespace lockstep::cli

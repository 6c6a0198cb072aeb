// One function per verb. It adds the verb to the command line and sets `action` when the verb is chosen.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

namespace lockstep::cli {

using Action = std::function<int()>;  // Returns the exit status.

void add_run(CLI::App& app, Action& action);
void add_key(CLI::App& app, Action& action);
void add_doctor(CLI::App& app, Action& action);
void add_schedule(CLI::App& app, Action& action);
void add_trace(CLI::App& app, Action& action);
void add_trace_profile(CLI::App& trace, Action& action);

// Merges the ranks' profiles in this folder and prints the summary. Throws ConfigError.
int show_profile(const std::string& directory);

// Rewrites the arguments before the program of `run` for CLI11: replaces torchrun's spellings by ours, and
// removes the "--" of `run -n 2 -- PROGRAM`, which CLI11 would interpret differently.
void tidy_run(const CLI::App& app, std::vector<std::string>& arguments);

}  // namespace lockstep::cli

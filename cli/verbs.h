// One function per verb: adds it to the command line and sets what is to be done when it was chosen.
#pragma once

#include <functional>

#include <CLI/CLI.hpp>

namespace lockstep::cli {

using Action = std::function<int()>;  // the exit status

void add_run(CLI::App& app, Action& action);
void add_key(CLI::App& app, Action& action);
void add_doctor(CLI::App& app, Action& action);

// `run -n 2 -- PROGRAM`: CLI11 reads "--" in another way, so it goes before CLI11 sees it.
void drop_separator(std::vector<std::string>& arguments);

}  // namespace lockstep::cli

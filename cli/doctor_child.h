// Runs a program with a time limit and captures its output.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace lockstep::cli {

struct ChildOutcome {
  int status = -1;     // 128 + the signal's number if a signal ended it; 127 if it could not be started.
  bool late = false;   // True if it was ended because its time was over.
  std::string output;  // Standard output and standard error, interleaved.

  // The line of the output that best describes the error.
  std::string complaint() const;
};

// Removes the variables of launchers (RANK and the like) from the child's environment.
ChildOutcome run_child(const std::vector<std::string>& command, std::chrono::milliseconds limit);

// The path of this program in PATH; empty if there is none.
std::string find_in_path(const std::string& name);

}  // namespace lockstep::cli

// Runs a program for its output, for a limited time.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace lockstep::cli {

struct ChildOutcome {
  int status = -1;     // 128 + the signal's number for a signal; 127 where it could not be started
  bool late = false;   // ended by us when its time was over
  std::string output;  // standard output and error together

  // The line that says best what went wrong, for people.
  std::string complaint() const;
};

// What launched this process is none of the child's business: RANK and its like are not passed on.
ChildOutcome run_child(const std::vector<std::string>& command, std::chrono::milliseconds limit);

// Where PATH has this program; empty where it has not.
std::string find_in_path(const std::string& name);

}  // namespace lockstep::cli

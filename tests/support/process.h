// Runs programs and returns their output and status.
#pragma once

#include <chrono>
#include <map>
#include <string>
#include <vector>

namespace lockstep::testing {

struct Program {
  std::vector<std::string> command;
  std::map<std::string, std::string> environment = {};  // Added to this process's environment.
};

struct Outcome {
  int status = -1;     // The exit status; 128 + the signal's number.
  std::string output;  // Standard output and standard error, interleaved.
  double seconds = 0;
};

// Runs all of them at once. At the limit, which only ends a hanging test, they are killed with their
// descendants.
std::vector<Outcome> run_together(const std::vector<Program>& programs,
                                  std::chrono::seconds limit = std::chrono::seconds(180));
Outcome run(const Program& program, std::chrono::seconds limit = std::chrono::seconds(180));

// An unused port of 127.0.0.1. It is outside of the system's ephemeral range, and no other test reserves it
// while this process lives.
int free_port();

}  // namespace lockstep::testing

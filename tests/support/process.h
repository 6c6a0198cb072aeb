// Runs programs and says what they printed and how they ended.
#pragma once

#include <chrono>
#include <map>
#include <string>
#include <vector>

namespace lockstep::testing {

struct Program {
  std::vector<std::string> command;
  std::map<std::string, std::string> environment = {};  // added to this process's
};

struct Outcome {
  int status = -1;     // the exit status; 128 + the signal's number
  std::string output;  // standard output and error together
  double seconds = 0;
};

// All at once; killed, with everything they started, when the limit is over.
std::vector<Outcome> run_together(const std::vector<Program>& programs,
                                  std::chrono::seconds limit = std::chrono::seconds(60));
Outcome run(const Program& program, std::chrono::seconds limit = std::chrono::seconds(60));

// A port of 127.0.0.1 that was free a moment ago.
int free_port();

}  // namespace lockstep::testing

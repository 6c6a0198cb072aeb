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

// All at once; killed, with everything they started, when the limit is over, which only ends a test that
// hangs.
std::vector<Outcome> run_together(const std::vector<Program>& programs,
                                  std::chrono::seconds limit = std::chrono::seconds(180));
Outcome run(const Program& program, std::chrono::seconds limit = std::chrono::seconds(180));

// A port of 127.0.0.1 that nobody uses. It is outside of the range from which the system takes ports, and no
// other test that asks gets it as long as this process lives.
int free_port();

}  // namespace lockstep::testing

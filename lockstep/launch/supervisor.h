// Starts the ranks of a job on this host and stays with them until the last has ended.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace lockstep::detail {

struct LaunchPlan {
  std::vector<std::string> command;  // the program and its arguments
  int num_ranks = 1;
  int threads = 0;                        // OMP_NUM_THREADS of each rank; 0: cores / ranks, unless it is set
  std::chrono::milliseconds grace{5000};  // between SIGTERM and SIGKILL for those that remain
};

// Each rank gets torchrun's variables. When one fails, its rank, pid and cause are told on standard error,
// the others are ended, and its status is returned (128 + the signal's number for a signal). SIGINT,
// SIGTERM and SIGHUP go to every rank and what it started; a second one kills them. Throws ConfigError when
// the program cannot be started.
int supervise(const LaunchPlan& plan);

// Processors that this process may use.
int available_cores();

}  // namespace lockstep::detail

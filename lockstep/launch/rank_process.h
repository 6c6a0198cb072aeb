// Starting one rank. The launcher has threads, so that between fork and exec only what is safe in a signal
// handler may be called: everything is prepared before.
#pragma once

#include <sys/resource.h>
#include <sys/types.h>

#include <csignal>
#include <string>
#include <vector>

#include <lockstep/launch/options.h>
#include <lockstep/launch/placement.h>

namespace lockstep::detail {

// Where a rank stands, for its environment.
struct RankPlace {
  int rank = 0, world_size = 1;
  int local_rank = 0;
  int attempt = 0;
  std::string master_address;
  int master_port = 0;
  int threads = 1;
  std::string agent;  // the name of its socket
};

// "NAME=VALUE", sorted: this process's environment, the options' changes, and the rank's own variables.
std::vector<std::string> rank_environment(const LaunchOptions& options, const RankPlace& place);

// Whether the launcher gives this variable a value of its own, so that nobody else can.
bool is_launchers_variable(const std::string& name);

// The file that execvp would run for the options' command; ConfigError where there is none.
std::string find_program(const LaunchOptions& options);
// That file is no script.
bool is_binary(const LaunchOptions& options, const std::string& file);
// Why it could not be started, from the error with which that ended.
std::string why_not_started(const LaunchOptions& options, const std::string& file, int error);

struct RankProcess {
  std::string file;
  bool is_binary = false;  // and so nothing for a shell
  std::vector<std::string> arguments, environment;
  std::string directory;  // empty: this one
  CpuMask mask;           // empty: not bound
  int in = -1, out = -1, err = -1;
  int report = -1;        // gets errno where the program could not be started; closed on exec
  rlim_t open_files = 0;  // the soft limit that it is to have; 0: as it is
  sigset_t signals{};     // blocked
};

// In a session of its own, a moment after this returns, and killed by the kernel when the calling thread
// ends. Throws std::system_error where there can be no more processes.
pid_t start_rank(const RankProcess& process);

}  // namespace lockstep::detail

// Starts one rank. The launcher has threads, so only async-signal-safe functions may be called between fork
// and exec: everything is prepared before the fork.
#pragma once

#include <sys/resource.h>
#include <sys/types.h>

#include <csignal>
#include <string>
#include <vector>

#include <lockstep/launch/options.h>
#include <lockstep/launch/placement.h>

namespace lockstep::detail {

// A rank's position in the job, for its environment.
struct RankPlace {
  int rank = 0, world_size = 1;
  int local_rank = 0;
  int attempt = 0;
  std::string master_address;
  int master_port = 0;
  int threads = 1;
  std::string agent;  // The name of the agent's socket.
};

// "NAME=VALUE", sorted: this process's environment, the options' changes and the rank's own variables.
std::vector<std::string> rank_environment(const LaunchOptions& options, const RankPlace& place);

// True if the launcher sets this variable itself, so that options must not change it.
bool is_launchers_variable(const std::string& name);

// The file that execvp would run for the options' command. Throws ConfigError if there is none.
std::string find_program(const LaunchOptions& options);
// True if the file is not a script.
bool is_binary(const LaunchOptions& options, const std::string& file);
// Explains why exec failed with this error.
std::string why_not_started(const LaunchOptions& options, const std::string& file, int error);

struct RankProcess {
  std::string file;
  bool is_binary = false;  // If true, the shell cannot run it.
  std::vector<std::string> arguments, environment;
  std::string directory;  // Empty: the current directory.
  CpuMask mask;           // Empty: not bound.
  int in = -1, out = -1, err = -1;
  int report = -1;        // Receives errno if exec fails; closed on exec.
  rlim_t open_files = 0;  // The soft limit on open files; 0: unchanged.
  sigset_t signals{};     // The signal mask.
};

// Returns before exec. The rank gets its own session, and the kernel kills it when the calling thread ends.
// Throws std::system_error if no process can be created.
pid_t start_rank(const RankProcess& process);

}  // namespace lockstep::detail

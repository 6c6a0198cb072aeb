// The ranks of this host: starts, signals and waits for them.
#pragma once

#include <sys/resource.h>
#include <sys/types.h>

#include <csignal>
#include <functional>
#include <string>
#include <vector>

#include <lockstep/control/agent/agent.h>
#include <lockstep/launch/options.h>
#include <lockstep/launch/output.h>
#include <lockstep/launch/placement.h>
#include <lockstep/launch/rank_process.h>
#include <lockstep/os/socket.h>

namespace lockstep::detail {

class LocalRanks {
 public:
  struct Rank {
    int number = 0;  // World rank.
    pid_t pid = -1;
    bool running = false;
    bool killed = false;  // True if this process killed it.
  };

  // Finds the program, assigns cores and raises the limit on open files. stdin_fd: for the rank that reads
  // standard input, or -1. signals: the ranks' signal mask. Throws ConfigError.
  LocalRanks(const LaunchOptions& options, int stdin_fd, const sigset_t& signals);

  const Placement& placement() const { return placement_; }

  using Started = std::function<void(const Rank&)>;
  void start(const control::Start& start, const std::string& agent, Output& output, const Started& started);
  bool reads_input() const;  // True if one of them has the standard input.

  // Readable once it is known whether the program started; check_start() throws ConfigError if it did not.
  int start_fd() const { return exec_errors_.get(); }
  void check_start();

  // Reaps ended ranks, and orphans that became children of this process.
  using HasEnded = std::function<void(const Rank&, const control::Ended&)>;
  void reap(const HasEnded& ended);

  std::vector<Rank> running() const;
  bool was_killed(int number) const;

  // The functions below reach the running ranks and those of their descendants that are still in their
  // groups.
  void send(int signal);
  void wake_for(int signal);  // Also continues stopped ranks, so that they receive it.
  void kill();
  void kill_stopped();
  // Stops waiting for the ranks that still run and returns them.
  std::vector<Rank> give_up();

 private:
  Rank start_one(const RankPlace& place, int report, Output& output);

  const LaunchOptions& options_;
  const int stdin_fd_;
  const sigset_t signals_;
  const std::string program_;
  const Placement placement_;
  const rlim_t open_files_;  // The limit on open files that the ranks get.
  const control::Fd null_;
  control::Fd exec_errors_;
  std::vector<Rank> ranks_;
};

}  // namespace lockstep::detail

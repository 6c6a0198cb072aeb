// The ranks of this host: starting them, signals to them, waiting for them.
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
    int number = 0;  // in the world
    pid_t pid = -1;
    bool running = false;
    bool killed = false;  // by us
  };

  // Finds the program and its cores, and allows the files that are needed. stdin_fd: for the rank that has a
  // standard input, -1 where there is none; signals: the mask that the ranks are to have. Throws ConfigError.
  LocalRanks(const LaunchOptions& options, int stdin_fd, const sigset_t& signals);

  const Placement& placement() const { return placement_; }

  using Started = std::function<void(const Rank&)>;
  void start(const control::Start& start, const std::string& agent, Output& output, const Started& started);
  bool reads_input() const;  // one of them has the standard input

  // Readable when it is known whether the program could be started; check_start() throws ConfigError where it
  // could not.
  int start_fd() const { return exec_errors_.get(); }
  void check_start();

  // Waits for those that have ended, also for processes that others have left to us.
  using HasEnded = std::function<void(const Rank&, const control::Ended&)>;
  void reap(const HasEnded& ended);

  std::vector<Rank> running() const;
  bool was_killed(int number) const;

  // Each goes to the ranks that run, with what they started, as far as that has not left their groups.
  void send(int signal);
  void wake_for(int signal);  // and continues those that are stopped, so that they get it
  void kill();
  void kill_stopped();
  // Those that run on are no longer waited for.
  std::vector<Rank> give_up();

 private:
  Rank start_one(const RankPlace& place, int report, Output& output);

  const LaunchOptions& options_;
  const int stdin_fd_;
  const sigset_t signals_;
  const std::string program_;
  const Placement placement_;
  const rlim_t open_files_;  // that the ranks may have
  const control::Fd null_;
  control::Fd exec_errors_;
  std::vector<Rank> ranks_;
};

}  // namespace lockstep::detail

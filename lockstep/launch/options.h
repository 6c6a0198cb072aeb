// The options of `lockstep run`.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep::detail {

// A set of world ranks.
class RankSet {
 public:
  static RankSet all() { return RankSet(true); }
  static RankSet none() { return RankSet(false); }
  // Parses "all", "none", "0,2" or "0-3"; `what` names the option in the ConfigError.
  static RankSet parse(std::string_view what, std::string_view text);

  bool contains(int rank) const;
  int highest() const;  // Highest rank listed; -1 for all and none.

 private:
  explicit RankSet(bool all) : all_(all) {}
  bool all_ = false;
  std::vector<std::pair<int, int>> ranges_;  // Inclusive ranges.
};

constexpr int kMostThreads = 4096;  // Per rank.

enum class Prefix { automatic, always, never };      // automatic: if there is more than one rank
enum class StatusLine { automatic, always, never };  // automatic: on a terminal
enum class Bind { automatic, cores, none };

struct LaunchOptions {
  std::vector<std::string> command;  // The program and its arguments.

  int num_ranks = 1;  // Number of ranks on this host.
  int node = 0, num_nodes = 1;
  std::string master_address;  // Several hosts: the address of the first host's agent.
  int master_port = 0;
  std::string key;  // Several hosts: the 32-byte key that all of them share.
  std::string job;  // Several hosts: a text that is the same on all of them.
  std::string interface;

  std::vector<std::pair<std::string, std::string>> set_environment;
  std::vector<std::string> unset_environment;
  std::string directory;
  std::optional<int> stdin_rank = 0;

  std::string log_directory;
  RankSet show = RankSet::all();
  Prefix prefix = Prefix::automatic;
  StatusLine status = StatusLine::automatic;
  bool quiet = false;  // True to omit the line that announces the job.

  std::string metrics;         // Folder for metrics, exported as LOCKSTEP_METRICS; empty: not exported.
  std::string metrics_format;  // Likewise.

  int threads = 0;  // Per rank; 0: LOCKSTEP_THREADS, else OMP_NUM_THREADS, else cores / ranks.
  Bind bind = Bind::automatic;

  std::string flight_record;  // File name; "none": not written; empty: in log_directory, else a new file.
  std::string timeout;        // Of each collective, as LOCKSTEP_TIMEOUT; empty: not exported.
  std::optional<std::chrono::milliseconds> join_timeout;
  std::chrono::milliseconds grace{5000};       // Between the first signal and SIGKILL.
  std::chrono::milliseconds stop_grace{5000};  // How long a rank may stay stopped.
  int max_restarts = 0;
};

}  // namespace lockstep::detail

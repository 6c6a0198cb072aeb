// What `lockstep run` was asked for.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep::detail {

// Some of the world's ranks.
class RankSet {
 public:
  static RankSet all() { return RankSet(true); }
  static RankSet none() { return RankSet(false); }
  // "all", "none", "0,2", "0-3"; `what` names it in the ConfigError that says what is wrong.
  static RankSet parse(std::string_view what, std::string_view text);

  bool contains(int rank) const;
  int highest() const;  // of those that were listed; -1 where none were

 private:
  explicit RankSet(bool all) : all_(all) {}
  bool all_ = false;
  std::vector<std::pair<int, int>> ranges_;  // both ends included
};

constexpr int kMostThreads = 4096;  // of a rank

enum class Prefix { automatic, always, never };      // automatic: where there is more than one rank
enum class StatusLine { automatic, always, never };  // automatic: on a terminal
enum class Bind { automatic, cores, none };

struct LaunchOptions {
  std::vector<std::string> command;  // the program and its arguments

  int num_ranks = 1;  // on this host
  int node = 0, num_nodes = 1;
  std::string master_address;  // with several hosts: where the first one's agent is found
  int master_port = 0;
  std::string key;  // with several hosts: 32 bytes that all of them have
  std::string job;  // with several hosts: the same text on all of them
  std::string interface;

  std::vector<std::pair<std::string, std::string>> set_environment;
  std::vector<std::string> unset_environment;
  std::string directory;
  std::optional<int> stdin_rank = 0;

  std::string log_directory;
  RankSet show = RankSet::all();
  Prefix prefix = Prefix::automatic;
  StatusLine status = StatusLine::automatic;
  bool quiet = false;  // no line at the start

  std::string metrics;         // the folder for what ranks log, as LOCKSTEP_METRICS; empty: not set by us
  std::string metrics_format;  // likewise

  int threads = 0;  // of each rank; 0: LOCKSTEP_THREADS, OMP_NUM_THREADS, else cores / ranks
  Bind bind = Bind::automatic;

  std::string flight_record;  // the file; "none": not written; empty: in log_directory, else a new one
  std::string timeout;        // of each collective, as LOCKSTEP_TIMEOUT takes it; empty: not set by us
  std::optional<std::chrono::milliseconds> join_timeout;
  std::chrono::milliseconds grace{5000};       // between the first signal and SIGKILL
  std::chrono::milliseconds stop_grace{5000};  // how long a rank may be stopped
  int max_restarts = 0;
};

}  // namespace lockstep::detail

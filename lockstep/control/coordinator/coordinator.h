// Coordinator: the job-wide state machine. Tracks membership, the key-value store, failures, waits and stop
// requests, and decides when to restart. It performs no I/O: the agent feeds it incoming frames and delivers
// its replies, so tests can drive it without sockets and with a fake clock.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <lockstep/control/board/flight.h>
#include <lockstep/control/coordinator/store.h>
#include <lockstep/control/coordinator/straggler_detector.h>
#include <lockstep/control/wire/messages.h>

namespace lockstep::control {

class Coordinator {
 public:
  struct Ports {
    std::function<void(int node, Frame)> send;  // frame.rank < 0: to every rank of the node.
    std::function<void(int node, Order)> order;
    std::function<void(const std::string&)> say;
    // Called with the record of an attempt that failed or was stopped.
    std::function<void(FlightRecord)> flight = {};
    // Called ten times a second once there are steps; may be empty.
    std::function<void(const Status&)> status = {};
  };
  struct Options {
    int num_nodes = 1;  // 0: nodes join in any number.
    // True under `lockstep run`, which starts the ranks and takes the orders Start, Failed, Stop and Finish.
    bool launches = true;
    int max_restarts = 0;
    std::string address = "127.0.0.1";               // The coordinator's address, for the ranks.
    std::chrono::milliseconds join_timeout{300000};  // Time for all nodes to join.
    // Cores shared by the ranks of the coordinator's host; 0: unknown. Other hosts' are not known.
    int cores = 0;
  };
  Coordinator(Options options, Ports ports);

  // Adds a node and returns its number; this host's own agent is 0. Throws ConfigError, whose text is for the
  // node.
  int add_node(const NodeHello& hello);
  // closed: the node's agent has ended. Otherwise nothing has been heard from the host.
  void node_lost(int node, bool closed, const std::string& why);
  // Takes a message of a rank of that node, or of its agent. Throws FrameError if it is malformed.
  void receive(int node, const Frame& frame);
  void tick(Clock::time_point now);
  // The ranks are stopped on purpose, so none of them is late.
  void paused(bool paused) { paused_ = paused; }

  int oldest_world() const;  // Oldest World of the ranks that are present; kNoWorld if there are none.
  // True if the job was refused and some of its processes have not yet joined to learn so.
  bool refuses_more() const { return refused_ && static_cast<int>(came_.size()) < size_; }

 private:
  struct Rank {
    int node = -1;
    bool here = false;  // True while the rank is in the job: it has joined and not left.
    bool welcomed = false;
    std::optional<Hello> card;
    std::optional<Ended> ended;
    std::optional<std::string> comm_fault;
    Clock::time_point comm_fault_at{};
    Rows rows;
    std::map<std::int64_t, std::int64_t> reached;  // The last collective that the rank began, by group.
    Clock::time_point rows_at{};
    std::int64_t looks = 0;  // Number of times rows arrived.
    std::int64_t stop_count = -1;
  };
  struct Node {
    int local_ranks = 0;
    int first_rank = 0;
    std::string address;
    int agent_rank = -1, agent_pid = 0;
    bool lost = false, done = false;
  };
  struct Wait {  // A rank's wait, and the ranks it waits for.
    int rank = 0;
    const Row* row = nullptr;
    std::vector<int> missing;
    std::int64_t waited_ms = 0;
    bool root = false;  // True if some of the missing ranks do not wait themselves.
  };

  void hello(int node, std::uint32_t from, const Hello& hello);
  void all_came();
  void refuse(const std::string& text);
  void rank_ended(int rank, const Ended& ended);
  void leave(int rank);
  void fault(int rank, const Fault& fault);
  void stop(int signal);
  void decide_stop();
  void node_done(int node);
  void all_done();
  void tell_flight();
  void finish(Finish finish);
  void start();
  bool has_begun() const;
  bool has_committed() const;
  void fail(Failure failure);
  void look_at_suspicion(Clock::time_point now);
  Failure failure_of(int rank, std::string cause) const;
  std::string where(int rank) const;
  std::string pid_text(int rank) const;
  std::string missing_text() const;
  std::vector<Wait> waits(Clock::time_point now) const;
  void look_at_waits(const std::vector<Wait>& all, Clock::time_point now);
  using Stuck = std::map<int, std::vector<const Wait*>>;  // The waits of each rank.
  Stuck deadlocked(const std::vector<Wait>& all) const;
  bool tells_of(int rank, std::int64_t key) const;
  using Differing = std::vector<std::pair<int, const Row*>>;  // The call of each rank of a group.
  Differing differing() const;
  void look_at_deadlock(const std::vector<Wait>& all, Clock::time_point now);
  Failure failure_of(const Stuck& stuck) const;
  Failure failure_of(const Differing& calls) const;
  void note_steps(int number, Rank& rank);
  void look_at_pace();
  void forget_groups(Clock::time_point now);
  void broadcast(const Frame& frame);
  void order_all(const Order& order);
  void send(int rank, Frame frame);

  const Options options_;
  const Clock::time_point born_ = Clock::now();
  const Ports ports_;
  std::map<int, Node> nodes_;
  std::map<int, Rank> ranks_;
  std::map<std::int64_t, GroupMade> groups_;
  std::map<std::int64_t, Clock::time_point> group_seen_;  // When the group was last on some rank's page.
  Clock::time_point forgets_at_{};
  StoreServer store_;
  StragglerDetector stragglers_;

  int size_ = 0;  // Size of the job; 0: not known yet.
  int attempt_ = 0;
  std::set<std::pair<std::string, int>> came_;  // Processes that have sent a hello, including refused ones.
  std::optional<std::string> refused_;
  std::optional<Failure> failure_, last_failure_;
  // A failure that another rank may have caused.
  std::optional<std::pair<Failure, Clock::time_point>> suspicion_;
  std::optional<int> stop_signal_;
  std::optional<std::int64_t> stop_at_;
  std::optional<Clock::time_point> start_at_;  // Start of the next attempt.
  bool finished_ = false;
  std::map<int, RankFlight> flights_;
  // For each wait: the time in ms after which it is reported again.
  std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> told_;
  // A set of ranks that wait for each other, or in different calls, as first seen: rank, group, sequence
  // number, and the number of looks at the rank so far.
  struct StuckWait {
    int rank;
    std::int64_t key, sequence, looks;
    bool same_as(const StuckWait& other) const {
      return rank == other.rank && key == other.key && sequence == other.sequence;
    }
  };
  std::vector<StuckWait> deadlock_;
  Clock::time_point deadlock_since_{};
  bool paused_ = false;
  // After a pause, a rank stopped inside a wait needs a moment to finish it.
  Clock::time_point quiet_until_{};
};

}  // namespace lockstep::control

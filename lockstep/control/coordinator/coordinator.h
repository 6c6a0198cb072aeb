// What is known of the whole job, and what follows from it: who has come, the store, who failed first, who
// waits for whom, when all stop, whether to start again. No sockets here: an agent brings what ranks and
// other agents say, and carries the answers.
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
    std::function<void(int node, Frame)> send;  // frame.rank < 0: to every rank of the node
    std::function<void(int node, Order)> order;
    std::function<void(const std::string&)> say;
    std::function<void(FlightRecord)> flight = {};   // of an attempt that failed or was stopped
    std::function<void(const Status&)> status = {};  // ten times a second, once there are steps; may be empty
  };
  struct Options {
    int num_nodes = 1;     // 0: they come as they come
    bool launches = true;  // `lockstep run` starts the ranks: Start, Failed, Stop and Finish are asked for
    int max_restarts = 0;
    std::string address = "127.0.0.1";               // of the head, for the ranks
    std::chrono::milliseconds join_timeout{300000};  // for all nodes to come
    int cores = 0;  // that the ranks of the head's host share; the other hosts' are not known. 0: not known
  };
  Coordinator(Options options, Ports ports);

  // A node: this host's own agent is 0. Throws ConfigError, whose text the node should get.
  int add_node(const NodeHello& hello);
  // closed: its agent has ended; else nothing is heard from the host.
  void node_lost(int node, bool closed, const std::string& why);
  // From a rank of that node, or from its agent. Throws FrameError for what makes no sense.
  void receive(int node, const Frame& frame);
  void tick(Clock::time_point now);
  void paused(bool paused) { paused_ = paused; }  // the ranks are stopped on purpose: nobody is late

  int oldest_world() const;  // of the ranks that are here; kNoWorld: none is
  // The job was refused, and not all who belong to it have come to hear it.
  bool refuses_more() const { return refused_ && static_cast<int>(came_.size()) < size_; }

 private:
  struct Rank {
    int node = -1;
    bool here = false;  // has come and has not left
    bool welcomed = false;
    std::optional<Hello> card;
    std::optional<Ended> ended;
    std::optional<std::string> comm_fault;
    Clock::time_point comm_fault_at{};
    Rows rows;
    std::map<std::int64_t, std::int64_t> reached;  // the last collective that it began, by group
    Clock::time_point rows_at{};
    std::int64_t looks = 0;  // how often rows came
    std::int64_t stop_count = -1;
  };
  struct Node {
    int local_ranks = 0;
    int first_rank = 0;
    std::string address;
    int agent_rank = -1, agent_pid = 0;
    bool lost = false, done = false;
  };
  struct Wait {  // somebody waits, and this is for whom
    int rank = 0;
    const Row* row = nullptr;
    std::vector<int> missing;
    std::int64_t waited_ms = 0;
    bool root = false;  // those who are missing do not wait themselves
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
  using Stuck = std::map<int, std::vector<const Wait*>>;  // what each rank waits for
  Stuck deadlocked(const std::vector<Wait>& all) const;
  bool tells_of(int rank, std::int64_t key) const;
  using Differing = std::vector<std::pair<int, const Row*>>;  // what each rank of a group has called
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
  std::map<std::int64_t, Clock::time_point> group_seen_;  // on some rank's page
  Clock::time_point forgets_at_{};
  StoreServer store_;
  StragglerDetector stragglers_;

  int size_ = 0;  // of the job; 0: not known yet
  int attempt_ = 0;
  std::set<std::pair<std::string, int>> came_;  // processes that have said hello, also those refused
  std::optional<std::string> refused_;
  std::optional<Failure> failure_, last_failure_;
  std::optional<std::pair<Failure, Clock::time_point>> suspicion_;  // it may be another rank's doing
  std::optional<int> stop_signal_;
  std::optional<std::int64_t> stop_at_;
  std::optional<Clock::time_point> start_at_;  // of the next attempt
  bool finished_ = false;
  std::map<int, RankFlight> flights_;
  std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> told_;  // of a wait: until when, in ms
  // A set of ranks that wait for one another, or in different calls, as it was first seen: rank, group, sequence number, and how many
  // looks at the rank there had been.
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
  Clock::time_point quiet_until_{};  // after a pause: who was stopped inside a wait needs a moment to end it
};

}  // namespace lockstep::control

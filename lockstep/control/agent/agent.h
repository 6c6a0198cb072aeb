// The agent of a host. The ranks of this host connect to it, and it connects to the coordinator, which runs
// in the first host's agent. The agent carries store requests, watches that ranks are alive, notifies every
// rank of a failure and reports which ranks wait for which. It runs inside `lockstep run`, or inside a rank
// if another launcher started the job. Does not use LibTorch.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/control/board/steps.h>
#include <lockstep/control/wire/failure.h>

namespace lockstep::control {

// Where the agents of several hosts connect, and the key that each must prove.
struct Link {
  std::string address = {};  // The coordinator's, as given: a name or a number.
  int port = 0;
  // The coordinator takes the first free port from port to last_port; others try them in turn.
  int last_port = 0;
  std::string key = {};  // 32 bytes.
  // The same text on every host of this job and of no other job; it is part of the proof.
  std::string job = {};
};

struct FlightRecord;

struct AgentOptions {
  std::string name = {};  // Name of the abstract unix socket at which ranks find the agent.
  int node = 0, num_nodes = 1;
  // Number of ranks this node starts; 0 if another launcher starts them.
  int local_ranks = 0;
  int max_restarts = 0;
  std::optional<Link> link = {};                   // For several hosts.
  bool coordinator = true;                         // True if this node's agent runs the coordinator.
  int agent_rank = -1;                             // The rank whose process it runs in; -1: `lockstep run`.
  std::chrono::milliseconds stop_grace{5000};      // How long a rank may stay stopped.
  std::chrono::milliseconds join_timeout{300000};  // Time for the other hosts to join.
  std::function<void(const std::string&)> say;     // Logs a line for the user; called from any thread.
  // Explains why a rank was killed (out of memory), if that can be determined.
  std::function<std::string(const Ended&)> explain = {};
  // On the coordinator, after an attempt failed or was stopped, and before the next begins or the job
  // finishes: receives the last operations of all ranks. Called on the agent's thread.
  std::function<void(FlightRecord)> flight = {};
  // On the coordinator, ten times a second while ranks make steps; called from any thread.
  std::function<void(const Status&)> status = {};
};

// Orders to `lockstep run`, which starts the ranks, in this sequence: Start, then possibly Stop and Failed,
// and once node_done() has been called on every node, Start again or Finish.
struct Start {
  int attempt = 0;  // 0, plus one for each restart.
  int first_rank = 0, world_size = 1;
  std::string address = {};  // The coordinator's address, as ranks reach it; 127.0.0.1 on one host.
};
struct Stop {  // Forward a signal to the ranks: the job is asked to save and end.
  int signal = 0;
};
struct Failed {  // The ranks have been notified; terminate those that do not end by themselves.
  Failure failure;
};
struct Finish {
  int status = 0;
  std::string why = {};  // For the user, if there is anything to report; may have several lines.
};
using Order = std::variant<Start, Stop, Failed, Finish>;

// Another agent of this job already runs on this host.
class NameInUse : public Error {
 public:
  using Error::Error;
};

class Agent {
 public:
  // Throws NameInUse, or ConfigError: a port in use, an address of another host.
  explicit Agent(AgentOptions options);
  ~Agent();
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  // For `lockstep run`. Readable (poll) when an order is available.
  int orders_fd() const;
  std::vector<Order> take_orders();
  void rank_started(int rank, int pid);
  void rank_ended(int rank, Ended how);
  void node_done();  // Every rank of this node has ended.
  // Closes the connections to other hosts before the ranks here are killed, so that the end of the host is
  // reported, not that of a rank. Returns when that is done.
  void leave_hosts();
  void stop(int signal);        // Becomes Stop on every node.
  void paused(bool paused);     // The ranks are being stopped on purpose (Ctrl-Z), or continued.
  std::string address() const;  // "host:port" at which other hosts connect; empty if none do.

  // For an agent inside a rank: true if every rank of this host, and on the coordinator of every host, has
  // left that World of its process, or an earlier one.
  bool deserted(int world) const;

 private:
  class Loop;
  std::shared_ptr<Loop> loop_;
};

}  // namespace lockstep::control

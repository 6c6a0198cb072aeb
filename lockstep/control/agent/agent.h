// One per host: the ranks of this host connect to it, and it to the head (itself on the first host). It
// carries the store, watches that ranks live, tells every rank when one has failed, and knows who waits for
// whom. It runs inside `lockstep run`, or inside a rank when another launcher started the job. No LibTorch.
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

// Where the agents of several hosts meet, and the key that each must prove.
struct Link {
  std::string address = {};  // the head's, as given: name or number
  int port = 0;
  int last_port = 0;     // the head takes the first free one from port to last_port; callers try them in turn
  std::string key = {};  // 32 bytes
  std::string job = {};  // the same text on every host of this job, and of no other: it is part of the proof
};

struct FlightRecord;

struct AgentOptions {
  std::string name = {};  // of the socket on which ranks find it: an abstract unix socket
  int node = 0, num_nodes = 1;
  // How many ranks this node starts; 0: it starts none itself, they come (another launcher started them).
  int local_ranks = 0;
  int max_restarts = 0;
  std::optional<Link> link = {};                   // for several hosts
  bool coordinator = true;                         // this node's agent is the head
  int agent_rank = -1;                             // the rank whose process it runs in; -1: `lockstep run`
  std::chrono::milliseconds stop_grace{5000};      // how long a rank may be stopped
  std::chrono::milliseconds join_timeout{300000};  // for the other hosts to come
  std::function<void(const std::string&)> say;     // a line to the person; any thread
  std::function<std::string(const Ended&)> explain =
      {};  // why a rank was killed (out of memory), where one can tell
  // On the head, when an attempt has failed or was stopped, before the next begins or the job finishes: the
  // last operations of all ranks. On the agent's thread.
  std::function<void(FlightRecord)> flight = {};
  std::function<void(const Status&)> status =
      {};  // on the head, ten times a second while ranks make steps; any thread
};

// What the agent asks of whoever starts the ranks (`lockstep run`), in this order:
// Start, then perhaps Stop and Failed, and when node_done() was called on every node, Start again or Finish.
struct Start {
  int attempt = 0;  // 0, then one more with each restart
  int first_rank = 0, world_size = 1;
  std::string address = {};  // of the head, as every rank reaches it; 127.0.0.1 on one host
};
struct Stop {  // a signal for the ranks: somebody wants the job to end, having saved
  int signal = 0;
};
struct Failed {  // the ranks have been told; those that do not end by themselves are to be ended
  Failure failure;
};
struct Finish {
  int status = 0;
  std::string why = {};  // for the person, where there is something to say; may have several lines
};
using Order = std::variant<Start, Stop, Failed, Finish>;

// Another agent of this job is on this host already.
class NameInUse : public Error {
 public:
  using Error::Error;
};

class Agent {
 public:
  explicit Agent(
      AgentOptions options);  // throws NameInUse, ConfigError: a port in use, an address that is not ours
  ~Agent();
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  // For `lockstep run`. Readable (poll) when there is an order to take.
  int orders_fd() const;
  std::vector<Order> take_orders();
  void rank_started(int rank, int pid);
  void rank_ended(int rank, Ended how);
  void node_done();  // every rank of this node has ended
  // Closes the connections to other hosts, before the ranks here are killed: this host ends, and not one of its
  // ranks. Returns when that is done.
  void leave_hosts();
  void stop(int signal);        // becomes Stop on every node
  void paused(bool paused);     // the ranks are being stopped (Ctrl-Z), or go on: no cause for alarm
  std::string address() const;  // "host:port" at which other hosts are awaited; empty: none

  // For an agent inside a rank: whether every rank of this host, and on the head of every host, has left that
  // World of its process, or an earlier one.
  bool deserted(int world) const;

 private:
  class Loop;
  std::shared_ptr<Loop> loop_;
};

}  // namespace lockstep::control

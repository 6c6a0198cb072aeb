// What the frames say.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/control/agent/agent.h>
#include <lockstep/control/board/steps.h>
#include <lockstep/control/wire/frame.h>

namespace lockstep::control {

constexpr int kMostRanks = 1 << 20;
constexpr int kNoWorld = std::numeric_limits<int>::max();

// A rank comes: what it believes of the job, and what it is.
struct Hello {
  int rank = 0, size = 1;
  int local_rank = -1, local_size = -1;  // -1: not known
  int pid = 0;
  int world = 0;    // counts the Worlds of a process: it may leave and join again
  int attempt = 0;  // of the job, as `lockstep run` counts restarts
  int threads = 0;
  std::string version = {}, host = {};

  std::string encode() const;
  static Hello decode(std::string_view payload);
};

// The agent's first answer: who it is. A descriptor of the board comes with it.
struct Attach {
  int agent_pid = 0;
  int agent_rank = -1;  // the rank whose process it runs in; -1: `lockstep run`
  int stop_grace_ms = 0;

  std::string encode() const;
  static Attach decode(std::string_view payload);
};

// All have come.
struct Welcome {
  int local_rank = 0, local_size = 1;
  std::string address = {};     // of this host, as the others reach it; empty: all are on this host
  std::vector<int> nodes = {};  // of each rank: those with the same number share a host
  std::vector<int> threads = {};

  std::string encode() const;
  static Welcome decode(std::string_view payload);
};

struct GroupMade {
  std::int64_t key = 0;  // the same on every member, and of no other group
  std::string name = {};
  std::vector<int> ranks = {};

  std::string encode() const;
  static GroupMade decode(std::string_view payload);
};

// Something went wrong in a rank that still runs.
struct Fault {
  enum class Kind : std::uint8_t {
    exception,      // nobody caught it: the rank is about to end
    unwinding,      // its World is left because of an exception that somebody may catch
    comm,           // an operation failed: most likely because of another rank
    uncaught_comm,  // and nobody caught its error: the rank is about to end
  };
  Kind kind{};
  std::string text = {};

  std::string encode() const;
  static Fault decode(std::string_view payload);
};

// Where a rank is in one group: its last operation, and the one that it waits for.
struct Row {
  std::int64_t key = 0;  // the group's
  std::string group = {};
  std::int64_t sequence = -1;
  std::string operation = {}, site = {};
  bool message = false;  // a send or receive
  int peer = -1;         // of a message
  bool running = false;
  std::int64_t since_ms = 0;  // how long ago the last thing happened: it began, or ended
  std::int64_t waited_ms = -1;
  std::int64_t waits_for = -1;  // the sequence number of what it waits for
};

struct Rows {
  std::int64_t step = -1;
  // Number of steps that the last checkpoint holds which this process saved: 1 + step, 0 before the first one.
  // -1: it has saved none.
  std::int64_t committed = -1;
  // Number of threads of the process that issue operations, and of those that are blocked in a wait for one.
  int threads = 0, blocked = 0;
  std::vector<Row> rows = {};
  std::vector<StepTime> times = {};  // that were not told before
  std::vector<Metric> metrics = {};

  std::string encode() const;
  static Rows decode(std::string_view payload);
};

struct NodeHello {
  int node = -1;  // -1: to be given one
  int num_nodes = 0, local_ranks = 0;
  int agent_rank = -1, agent_pid = 0;  // the rank whose process the agent runs in
  std::string version = {}, address = {};

  std::string encode() const;
  static NodeHello decode(std::string_view payload);
};

std::string encode(const Ended& ended);
Ended decode_ended(std::string_view payload);
std::string encode(const Failure& failure);
Failure decode_failure(std::string_view payload);
// Of an agent's Order.
std::string encode(const Order& order);
Order decode_order(std::string_view payload);

}  // namespace lockstep::control

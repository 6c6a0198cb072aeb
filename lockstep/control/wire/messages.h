// Payloads of the frames.
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

// A rank joins: its identity, and what it knows of the job.
struct Hello {
  int rank = 0, size = 1;
  int local_rank = -1, local_size = -1;  // -1: not known.
  int pid = 0;
  int world = 0;    // Counts the Worlds of a process, which may leave and join again.
  int attempt = 0;  // The job's attempt, as `lockstep run` counts restarts.
  int threads = 0;
  std::string version = {}, host = {};

  std::string encode() const;
  static Hello decode(std::string_view payload);
};

// The agent's first answer: its identity. The board's descriptor is attached.
struct Attach {
  int agent_pid = 0;
  int agent_rank = -1;  // The rank whose process it runs in; -1: `lockstep run`.
  int stop_grace_ms = 0;

  std::string encode() const;
  static Attach decode(std::string_view payload);
};

// All ranks have joined.
struct Welcome {
  int local_rank = 0, local_size = 1;
  std::string address = {};     // This host's address for other hosts; empty if all ranks are on this host.
  std::vector<int> nodes = {};  // Of each rank; ranks with the same number share a host.
  std::vector<int> threads = {};

  std::string encode() const;
  static Welcome decode(std::string_view payload);
};

struct GroupMade {
  std::int64_t key = 0;  // The same on every member, and unique to the group.
  std::string name = {};
  std::vector<int> ranks = {};

  std::string encode() const;
  static GroupMade decode(std::string_view payload);
};

// An error in a rank that is still running.
struct Fault {
  enum class Kind : std::uint8_t {
    exception,      // An uncaught exception: the rank is about to end.
    unwinding,      // An exception, which may still be caught, unwinds the rank's World.
    comm,           // A failed operation, most likely because of another rank.
    uncaught_comm,  // The same, uncaught: the rank is about to end.
  };
  Kind kind{};
  std::string text = {};

  std::string encode() const;
  static Fault decode(std::string_view payload);
};

// A rank's state in one group: its last operation, and the one it waits for.
struct Row {
  std::int64_t key = 0;  // The group's key.
  std::string group = {};
  std::int64_t sequence = -1;
  std::string operation = {}, site = {};
  bool message = false;  // A send or receive.
  int peer = -1;         // Of a message.
  bool running = false;
  std::int64_t since_ms = 0;  // Time since the operation began or ended.
  std::int64_t waited_ms = -1;
  std::int64_t waits_for = -1;  // Sequence number of the operation it waits for.
};

struct Rows {
  std::int64_t step = -1;
  // Number of steps in the last checkpoint that this process saved: 1 + step, 0 before the first step. -1: it
  // has saved none.
  std::int64_t committed = -1;
  // Number of threads of the process that issue operations, and of those that are blocked in a wait for one.
  int threads = 0, blocked = 0;
  std::vector<Row> rows = {};
  std::vector<StepTime> times = {};  // Not reported before.
  std::vector<Metric> metrics = {};

  std::string encode() const;
  static Rows decode(std::string_view payload);
};

struct NodeHello {
  int node = -1;  // -1: to be assigned.
  int num_nodes = 0, local_ranks = 0;
  int agent_rank = -1, agent_pid = 0;  // The rank whose process the agent runs in.
  std::string version = {}, address = {};

  std::string encode() const;
  static NodeHello decode(std::string_view payload);
};

std::string encode(const Ended& ended);
Ended decode_ended(std::string_view payload);
std::string encode(const Failure& failure);
Failure decode_failure(std::string_view payload);
// For an agent's Order.
std::string encode(const Order& order);
Order decode_order(std::string_view payload);

}  // namespace lockstep::control

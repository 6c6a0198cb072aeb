// Memory shared by bench_collectives and the ranks of one peer: the next order, a barrier that starts the
// ranks together, and the measured times. There is one page per peer. Peers wait for their turn asleep and
// use no processor time. No LibTorch, because Open MPI's ranks use it too.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace lockstep::bench {

enum class Op { all_reduce, reduce_scatter, all_gather, broadcast, all_to_all, barrier };
enum class Type { float32, bfloat16 };

constexpr const char* kOps[] = {"all_reduce", "reduce_scatter", "all_gather",
                                "broadcast",  "all_to_all",     "barrier"};
constexpr const char* kTypes[] = {"float32", "bfloat16"};
constexpr int kMaxRanks = 64, kMaxSamples = 64;

inline int bytes_of(Type type) { return type == Type::float32 ? 4 : 2; }

struct Order {
  enum class Kind { prepare, measure, release, leave };
  Kind kind = Kind::prepare;
  Op op = Op::all_reduce;
  Type type = Type::float32;
  bool allocated = false;  // True for memory from Group::allocate.
  std::int64_t bytes = 0;  // Size of one rank's whole tensor.
  int batch = 1;           // Number of operations per timed batch.
  int samples = 1;         // Number of batches.
};

struct Page {
  pid_t conductor;
  int ranks;
  bool spins;  // True if there is a core for every rank.
  Order order;
  std::atomic<std::uint32_t> turn;   // Incremented with each order.
  std::atomic<std::uint32_t> ready;  // Number of ranks that have completed the order.
  std::atomic<std::uint32_t> arrived, generation;
  std::atomic<std::uint32_t> failed;
  char error[1024];  // Error of the first rank that failed.
  // Nanoseconds of the host's clock.
  std::int64_t begin[kMaxSamples][kMaxRanks], end[kMaxSamples][kMaxRanks];
};

Page* open_page(const std::string& path, bool make);

// Sleeps while the word has this value, for at most half a second.
void sleep_while(std::atomic<std::uint32_t>& word, std::uint32_t value);
void wake_all(std::atomic<std::uint32_t>& word);

// Barrier over the ranks of the page. Throws if a rank has failed or the conductor has exited.
void meet(Page& page);
// Waits for the next order and returns it.
Order await_order(Page& page, std::uint32_t& turn);
void report_failure(Page& page, const std::string& what);

}  // namespace lockstep::bench

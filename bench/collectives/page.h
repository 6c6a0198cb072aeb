// What bench_collectives and the ranks of one peer share: a page of memory with the order that they carry out
// next, a barrier that starts them together, and the times they took. One page for each peer: whose turn it
// is not sleeps on its page and takes no processor time. No LibTorch: Open MPI's ranks use it as well.
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
  bool allocated = false;  // memory from Group::allocate
  std::int64_t bytes = 0;  // of the whole tensor of one rank
  int batch = 1;           // operations between two looks at the clock
  int samples = 1;         // how many such batches
};

struct Page {
  pid_t conductor;
  int ranks;
  bool spins;  // there is a core for every rank
  Order order;
  std::atomic<std::uint32_t> turn;   // rises with each order
  std::atomic<std::uint32_t> ready;  // how many ranks have carried it out
  std::atomic<std::uint32_t> arrived, generation;
  std::atomic<std::uint32_t> failed;
  char error[1024];                                                         // of the first rank that failed
  std::int64_t begin[kMaxSamples][kMaxRanks], end[kMaxSamples][kMaxRanks];  // nanoseconds of the host's clock
};

Page* open_page(const std::string& path, bool make);

// Sleeps while the word has this value, for half a second at most.
void sleep_while(std::atomic<std::uint32_t>& word, std::uint32_t value);
void wake_all(std::atomic<std::uint32_t>& word);

// Returns when all ranks have come. Throws when one has failed or the conductor is gone.
void meet(Page& page);
// The next order.
Order await_order(Page& page, std::uint32_t& turn);
void report_failure(Page& page, const std::string& what);

}  // namespace lockstep::bench

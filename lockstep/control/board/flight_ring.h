// The last operations of a rank, in shared memory beside its page of the board: written by the rank without a
// system call, read by the agent, also after the rank was killed in the middle of writing.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::control {

// Of a fixed size, so that a loop which calls from the same line makes them once.
struct CallTexts {
  char operation[16], dtype[16], reduction[8], site[48];

  template <std::size_t N>
  static void set(char (&to)[N], std::string_view from) {
    const auto length = std::min(from.size(), N - 1);
    std::memcpy(to, from.data(), length);
    std::memset(to + length, 0, N - length);
  }
};

// What a rank is about to do.
struct Begun {
  std::int64_t key = 0;  // the group's
  std::int64_t sequence = 0;
  std::int64_t count = 0, bytes = 0;
  int peer = -1;  // of a message; the root of a collective that has one
  bool message = false;
  std::chrono::steady_clock::time_point at = std::chrono::steady_clock::now();
};

// One operation, as it was read.
struct FlightEntry {
  std::int64_t key = 0;  // the group's
  bool message = false;  // a send or receive: those of a group count apart
  std::string operation = {}, dtype = {}, reduction = {}, site = {};
  std::int64_t sequence = 0, step = -1, count = 0, bytes = 0;
  int peer = -1;  // of a message; the root of a collective that has one. In the group's numbers
  std::int64_t began_ns = 0, ended_ns = 0;  // CLOCK_MONOTONIC; 0: it had not ended
  bool failed = false;

  bool operator==(const FlightEntry&) const = default;
};

struct FlightLog {
  std::int64_t begun = 0;                 // how many operations there were
  std::vector<FlightEntry> entries = {};  // the last of them, oldest first
};

inline std::int64_t in_ns(std::chrono::steady_clock::time_point time) {
  return std::chrono::nanoseconds(time.time_since_epoch()).count();
}

class FlightRing {
 public:
  static constexpr int kKept = 1000;  // that a reader is given

  using Ticket = std::uint64_t;  // of an operation, for its end
  static constexpr Ticket kNone = ~Ticket{0};

  // Before anybody writes: what is there counts no longer. Memory that was never written stays untouched.
  void clear() { next_.store(0, std::memory_order_relaxed); }

  // One writer at a time.
  Ticket begin(const Begun& begun, const CallTexts& texts, std::int64_t step) noexcept;
  void end(Ticket ticket, std::int64_t now_ns, bool failed) noexcept;

  // Any byte may be wrong, by a stray write of the program: what makes no sense is left out.
  FlightLog read() const;

 private:
  static constexpr std::size_t kSlots = 1024;  // more than are kept: the oldest may be written over meanwhile

  struct Record {
    std::int64_t key, sequence, step, count, bytes, began_ns;
    std::int32_t peer, message;
    CallTexts texts;
  };
  static constexpr std::size_t kWords = sizeof(Record) / 8;
  static_assert(sizeof(Record) % 8 == 0);

  // A version that belongs to one operation alone, and is odd while that is being written. The end is one
  // word, negative where the operation failed, so that it can be added at any time.
  struct Slot {
    std::atomic<std::uint64_t> version;
    std::atomic<std::int64_t> end;
    std::atomic<std::uint64_t> words[kWords];
  };

  std::atomic<std::uint64_t> next_;  // follows the record that it counts
  Slot slots_[kSlots];
};

}  // namespace lockstep::control

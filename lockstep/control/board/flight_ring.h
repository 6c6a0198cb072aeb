// The last operations of a rank, in shared memory next to its page of the board. The rank writes them without
// a system call; the agent reads them, even after the rank was killed in the middle of a write.
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

// Fixed-size texts of a call, so that a loop that calls from the same line builds them once.
struct CallTexts {
  char operation[16], dtype[16], reduction[8], site[48];

  template <std::size_t N>
  static void set(char (&to)[N], std::string_view from) {
    const auto length = std::min(from.size(), N - 1);
    std::memcpy(to, from.data(), length);
    std::memset(to + length, 0, N - length);
  }
};

// An operation that a rank is about to start.
struct Begun {
  std::int64_t key = 0;  // The group's key.
  std::int64_t sequence = 0;
  std::int64_t count = 0, bytes = 0;
  int peer = -1;  // The peer of a message, or the root of a collective that has one.
  bool message = false;
  std::chrono::steady_clock::time_point at = std::chrono::steady_clock::now();
};

// One operation, as read from the ring.
struct FlightEntry {
  std::int64_t key = 0;  // The group's key.
  bool message = false;  // A send or receive; a group's messages are numbered separately.
  std::string operation = {}, dtype = {}, reduction = {}, site = {};
  std::int64_t sequence = 0, step = -1, count = 0, bytes = 0;
  int peer = -1;  // The peer of a message, or the root of a collective that has one: a group rank.
  std::int64_t began_ns = 0, ended_ns = 0;  // CLOCK_MONOTONIC; 0: not ended.
  bool failed = false;

  bool operator==(const FlightEntry&) const = default;
};

struct FlightLog {
  std::int64_t begun = 0;                 // Number of operations ever begun.
  std::vector<FlightEntry> entries = {};  // The last of them, oldest first.
};

inline std::int64_t in_ns(std::chrono::steady_clock::time_point time) {
  return std::chrono::nanoseconds(time.time_since_epoch()).count();
}

class FlightRing {
 public:
  static constexpr int kKept = 1000;  // Number of entries a reader gets.

  using Ticket = std::uint64_t;  // Identifies an operation for end().
  static constexpr Ticket kNone = ~Ticket{0};

  // Call before the first write: discards old content. Does not touch memory that was never written.
  void clear() { next_.store(0, std::memory_order_relaxed); }

  // One writer at a time.
  Ticket begin(const Begun& begun, const CallTexts& texts, std::int64_t step) noexcept;
  void end(Ticket ticket, std::int64_t now_ns, bool failed) noexcept;

  // Any byte may be wrong, through a stray write of the program: entries that make no sense are skipped.
  FlightLog read() const;

 private:
  // More than are kept: the oldest may be overwritten during a read.
  static constexpr std::size_t kSlots = 1024;

  struct Record {
    std::int64_t key, sequence, step, count, bytes, began_ns;
    std::int32_t peer, message;
    CallTexts texts;
  };
  static constexpr std::size_t kWords = sizeof(Record) / 8;
  static_assert(sizeof(Record) % 8 == 0);

  // The version is unique to one operation, and odd while the operation is being written. The end is one
  // word, negative if the operation failed, so it can be added at any time.
  struct Slot {
    std::atomic<std::uint64_t> version;
    std::atomic<std::int64_t> end;
    std::atomic<std::uint64_t> words[kWords];
  };

  std::atomic<std::uint64_t> next_;  // Updated after the record that it counts.
  Slot slots_[kSlots];
};

}  // namespace lockstep::control

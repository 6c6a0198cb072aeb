// Region: the layout of a group's shared memory: a line and two slots for each rank, which only that rank
// writes, and a few words that all ranks share. Slots alternate with the parity of the step: no rank can be
// two steps ahead of another, so what a rank writes for a step is never read by a rank that is still in the
// step before the last.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include <lockstep/comm/call.h>

namespace lockstep::shm {

// A message up to this size is stored in the slot itself.
constexpr std::size_t kInline = 8192;
// Room for the text of a refusal, with its terminating zero.
constexpr std::size_t kRefusal = 1024;

// What a rank publishes when it reaches a collective.
struct Header {
  std::uint64_t digest;           // of what all calls must share
  std::uint64_t segment, offset;  // of its data; 0: not in shared memory
  std::uint64_t stage_segment, stage_offset, stage_size;
  std::uint64_t stage_is_new;  // peers have not mapped it yet
};

// State of one rank.
struct alignas(128) Line {
  std::atomic<std::uint64_t> arrived;  // number of steps that it has reached
  // It will arrive no more, because it has left or because one of its waits failed. Peers must not treat an
  // operation that it aborted as complete: its tensors may be reused by then.
  enum : std::uint32_t { kHere, kLeft, kFailed };
  std::atomic<std::uint32_t> presence;
  std::atomic<std::uint32_t> joined;
  std::atomic<std::uint32_t> ended;     // its process has ended, as a peer found out
  std::atomic<std::uint32_t> bell;      // counts notes left for it
  std::atomic<std::uint32_t> listens;   // number of its threads that sleep until the bell rings
  std::atomic<std::int32_t> waits_for;  // name + 1 of a rank outside the region that it waits for; 0: none
  pthread_mutex_t alive;                // robust mutex, held as long as the process lives
};

// State of the whole group.
struct alignas(128) Shared {
  std::atomic<std::uint32_t> epoch;     // changes when sleepers should look again
  std::atomic<std::uint32_t> sleepers;  // number of threads that sleep, or are about to
  std::atomic<std::uint32_t> roomy;     // waiters may spin briefly
};
// Chunks of an operation, claimed by the ranks that are running.
struct alignas(128) Claims {
  std::atomic<std::uint64_t> taken;
  alignas(64) std::atomic<std::uint64_t> finished;
};

// About a message: that it is there, that it was received, or that it does not match.
struct Note {
  enum : std::uint8_t { kMessage, kReceived, kRefused };
  std::uint8_t kind, dtype, dims;
  std::uint64_t id;
  std::int64_t tag, count, bytes;
  std::uint64_t segment, offset;
  std::int64_t shape[6];
  char site[80];
};
constexpr std::uint64_t kNotes = 8;
// Ring from one rank to another.
struct alignas(128) Channel {
  std::atomic<std::uint64_t> head;              // number of notes written, by the sender
  alignas(64) std::atomic<std::uint64_t> tail;  // number of notes taken, by the receiver
  Note notes[kNotes];
};

class Region {
 public:
  static std::size_t size_for(int ranks);
  Region(char* memory, int ranks) : memory_(memory), ranks_(ranks) {}

  void prepare();  // call it once, in the rank that allocated the memory, before any peer maps it

  int ranks() const { return ranks_; }
  Shared& shared() const { return *reinterpret_cast<Shared*>(memory_); }
  Claims& claims(std::uint64_t step) const {
    return *reinterpret_cast<Claims*>(memory_ + sizeof(Shared) + sizeof(Claims) * (step % 2));
  }
  Line& line(int rank) const {
    return *reinterpret_cast<Line*>(memory_ + sizeof(Shared) + 2 * sizeof(Claims) +
                                    sizeof(Line) * static_cast<std::size_t>(rank));
  }
  Header& header(int rank, std::uint64_t step) const { return *reinterpret_cast<Header*>(slot(rank, step)); }
  // Elements to each rank, then from each rank, for operations in which each pair has its own size.
  std::span<std::int64_t> sizes(int rank, std::uint64_t step) const {
    return {reinterpret_cast<std::int64_t*>(slot(rank, step) + sizeof(Header)),
            2 * static_cast<std::size_t>(ranks_)};
  }
  // The whole call, once ranks have seen that theirs differ, and the rank's reason for a refusal:
  // zero-terminated text, empty if it does not refuse.
  std::span<std::uint8_t> packed(int rank, std::uint64_t step) const {
    return {reinterpret_cast<std::uint8_t*>(data(rank, step)), detail::packed_size(ranks_)};
  }
  std::span<char> refusal(int rank, std::uint64_t step) const {
    return {data(rank, step) + detail::packed_size(ranks_), kRefusal};
  }
  Channel& channel(int from, int to) const {
    return *reinterpret_cast<Channel*>(memory_ + channels_at(ranks_) +
                                       sizeof(Channel) * static_cast<std::size_t>(from * ranks_ + to));
  }
  char* data(int rank, std::uint64_t step) const {
    return slot(rank, step) + slot_size(ranks_) - data_size(ranks_);
  }

 private:
  static std::size_t data_size(int ranks);
  static std::size_t slot_size(int ranks);
  static std::size_t channels_at(int ranks);
  char* slot(int rank, std::uint64_t step) const {
    return memory_ + sizeof(Shared) + 2 * sizeof(Claims) + sizeof(Line) * static_cast<std::size_t>(ranks_) +
           slot_size(ranks_) * (2 * static_cast<std::size_t>(rank) + step % 2);
  }

  char* memory_;
  int ranks_;
};

}  // namespace lockstep::shm

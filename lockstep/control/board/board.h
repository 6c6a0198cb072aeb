// Some shared memory for each rank, from the agent of its host: a page that says where the rank is (step,
// operation, what it waits for) and a ring of its last operations, written without a system call and read by
// the agent; and a lock that the rank holds as long as it lives. The kernel gives that lock up before it
// frees the memory of a process that ends, so a death is known at once at any size: a rank of 4 GiB was
// noticed after 0.2 ms; by the end of its connection, or by waiting for it, after 280.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include <lockstep/control/board/flight_ring.h>
#include <lockstep/control/board/progress.h>
#include <lockstep/control/wire/messages.h>

namespace lockstep::control {

class Board {
 public:
  // Lines of a page: groups beyond them are not on it.
  static constexpr int kLines = 28;

  // The agent's: makes it, for ranks 0 to num_ranks - 1. Throws std::system_error.
  explicit Board(int num_ranks);
  // A rank's: maps what the agent handed over; takes the descriptor.
  Board(int fd, int num_ranks);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  int fd() const { return fd_; }

  // The agent, before it hands the board to a rank: as if nobody had used it.
  void prepare(int rank);
  // The rank: holds the lock from here on; the calling thread must live as long as the process does.
  bool hold(int rank);
  void let_go(int rank);
  // The agent: until the holder has ended (true), has let go (false), or the time is over (nothing).
  std::optional<bool> holder_died(int rank, std::chrono::milliseconds limit);

  Rows rows(int rank) const;
  FlightLog flight(int rank) const { return ring(rank).read(); }
  // And how its steps went, but for those that `seen` counts.
  Rows rows(int rank, std::uint64_t& seen) const;

  struct Page;
  Page& page(int rank) const;
  FlightRing& ring(int rank) const;

 private:
  void map(int num_ranks);

  int fd_ = -1;
  std::size_t length_ = 0;
  char* memory_ = nullptr;
};

// A rank's pen. Any thread.
class StatusWriter {
 public:
  StatusWriter(std::shared_ptr<Board> board, int rank);

  void step(std::int64_t step);
  std::int64_t step() const;
  void committed();  // a checkpoint is on disk that holds all steps so far
  void metric(std::string_view name, double value, std::int64_t step);
  // A line for each group (collectives and messages apart); -1 when there is no more room.
  int add_line(std::int64_t key, std::string_view group, bool messages);
  void drop_line(int line);
  FlightRing::Ticket began(int line, const Begun& begun, const CallTexts& texts);
  // And so has a wait for it.
  void ended(int line, std::int64_t sequence, FlightRing::Ticket ticket, bool failed);
  // While it lives, the calling thread is blocked until an operation has ended. Counts only where the thread
  // issues operations, too.
  class Blocked {
   public:
    explicit Blocked(StatusWriter* writer);  // null: nothing
    ~Blocked();
    Blocked(const Blocked&) = delete;
    Blocked& operator=(const Blocked&) = delete;

   private:
    StatusWriter* const writer_;
  };
  void waits(int line, std::int64_t sequence);
  void waited(int line, std::int64_t sequence);

 private:
  class ThreadMark;
  static ThreadMark& thread_mark();
  template <typename What, typename F>
  void write(int line, F change);  // under the mutex

  const std::uint64_t number_;  // of no other StatusWriter of this process
  const std::shared_ptr<Board> board_;
  Board::Page& page_;
  FlightRing& ring_;
  std::mutex mutex_;
  StepTimer watch_;
};

}  // namespace lockstep::control

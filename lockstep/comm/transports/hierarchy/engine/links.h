// What ranks of different hosts send one another. No LibTorch.
#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <string>

#include <lockstep/base/awake_clock.h>

namespace lockstep::hierarchy {

using Clock = detail::AwakeClock;

class Links {
 public:
  // Under way. Its memory is needed until it has been waited for; after a failure, for good.
  class Transfer {
   public:
    virtual ~Transfer() = default;
  };
  using TransferPtr = std::unique_ptr<Transfer>;

  virtual ~Links() = default;
  // Neither waits. What goes from one rank to another under one tag arrives in order, and is received in the
  // size in which it was sent.
  virtual TransferPtr send(int to, const void* data, std::size_t bytes, int tag) = 0;
  virtual TransferPtr receive(int from, void* data, std::size_t bytes, int tag) = 0;
  virtual TransferPtr receive_any(void* data, std::size_t bytes, int tag) = 0;
  // Returns the rank at the other end. Throws as a wait in shared memory does: shm::Interrupted,
  // shm::TimedOut, shm::PeerLost. By one thread at a time for a transfer.
  virtual int wait(Transfer& transfer, Clock::time_point deadline) = 0;
  // Any thread: a wait for this one ends with shm::Interrupted, now or later.
  virtual void cancel(Transfer& transfer) = 0;
  // Why that rank will say no more, if so; any other rank, if it is not a rank. Asked now and then.
  virtual std::exception_ptr lost(int rank) = 0;
  // Any thread: every wait ends with this cause, now and later.
  virtual void interrupt(const std::string& cause) = 0;
};

}  // namespace lockstep::hierarchy

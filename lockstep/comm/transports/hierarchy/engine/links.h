// Links: messages between ranks of different hosts. Does not use LibTorch.
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
  // A message in flight. Its memory must stay valid until it has been waited for, or forever after a failure.
  class Transfer {
   public:
    virtual ~Transfer() = default;
  };
  using TransferPtr = std::unique_ptr<Transfer>;

  virtual ~Links() = default;
  // These never block. Messages from one rank to another with one tag arrive in order, and must be received
  // in the size in which they were sent.
  virtual TransferPtr send(int to, const void* data, std::size_t bytes, int tag) = 0;
  virtual TransferPtr receive(int from, void* data, std::size_t bytes, int tag) = 0;
  virtual TransferPtr receive_any(void* data, std::size_t bytes, int tag) = 0;
  // Returns the rank at the other end. Throws like a wait in shared memory: shm::Interrupted, shm::TimedOut,
  // shm::PeerLost. Only one thread at a time may wait for a transfer.
  virtual int wait(Transfer& transfer, Clock::time_point deadline) = 0;
  // Ends a wait for this transfer with shm::Interrupted, now or later. Thread-safe.
  virtual void cancel(Transfer& transfer) = 0;
  // Why nothing more can come from that rank, or null; of any rank, if `rank` is not one. Called now and
  // then.
  virtual std::exception_ptr lost(int rank) = 0;
  // Ends every wait with this cause, now and later. Thread-safe.
  virtual void interrupt(const std::string& cause) = 0;
};

}  // namespace lockstep::hierarchy

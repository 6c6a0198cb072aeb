// Peers: what a rank knows about the ranks of its group: their GPUs, and the events that they record.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <lockstep/comm/transports/cuda_ipc/engine/device.h>
#include <lockstep/comm/transports/shm/engine/engine.h>

namespace lockstep::cuda_ipc {

using detail::Op;
using shm::Clock;

// All-gather of one message per rank, all of the same length, through host memory. Call begin and finish
// alternately.
class Exchange {
 public:
  Exchange(shm::Engine& host, int rank, int ranks) : host_(host), rank_(rank), ranks_(ranks) {}
  void begin(std::vector<char> own);  // does not wait
  void finish(Clock::time_point deadline);
  const char* of(int rank) const { return all_.data() + own_.size() * static_cast<std::size_t>(rank); }
  void meet(Clock::time_point deadline);  // a barrier

 private:
  void start(Operation operation);
  shm::Engine& host_;
  const int rank_, ranks_;
  std::vector<char> own_, all_;
  Op part_;
};

struct Peers {
  // Meets the peers. Throws ConfigError if this cannot work on this host's GPUs.
  Peers(shm::Engine& host, int rank, int ranks, int device, Clock::time_point deadline);

  // Waits until the device has finished this rank's work: peers read from it after its events, and cannot
  // read from a process that has ended. Returns false if it has not finished: at the deadline, once `stop` is
  // set, or because a rank that it may wait for forever died or gave up. The tracks are not reused then.
  bool finish(const shm::Barrier& barrier, Clock::time_point deadline, const std::atomic<bool>& stop);

  const int rank, ranks, device;
  bool one_device = true;  // True if all ranks use the same device
  // Separate tracks, so that a message that waits does not delay a collective.
  const std::shared_ptr<Track> collectives, messages;
  // Rank r's events, as opened by this process. None for this rank.
  cudaEvent_t collective_event(int r, int event) const { return events_[index(r)][index(event)]; }
  cudaEvent_t message_event(int r, int event) const {
    return events_[index(r)][index(Track::kEvents + event)];
  }

 private:
  static std::size_t index(int i) { return static_cast<std::size_t>(i); }
  std::vector<std::vector<cudaEvent_t>> events_;
};

}  // namespace lockstep::cuda_ipc

// The ranks of a group as one of them knows them: which GPU each has, and the events that it records.
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

// Every rank's word to all others, of the same length, through the host's memory. begin and finish in turn.
class Exchange {
 public:
  Exchange(shm::Engine& host, int rank, int ranks) : host_(host), rank_(rank), ranks_(ranks) {}
  void begin(std::vector<char> own);  // does not wait
  void finish(Clock::time_point deadline);
  const char* of(int rank) const { return all_.data() + own_.size() * static_cast<std::size_t>(rank); }
  void meet(Clock::time_point deadline);  // with nothing to say

 private:
  void start(Operation operation);
  shm::Engine& host_;
  const int rank_, ranks_;
  std::vector<char> own_, all_;
  Op part_;
};

struct Peers {
  // Meets them. ConfigError where this cannot work on this host's GPUs.
  Peers(shm::Engine& host, int rank, int ranks, int device, Clock::time_point deadline);

  // Until the device has done what this rank gave it: others read from here, behind events, and not from a
  // process that has ended. False where it has not: at the deadline, when `stop` says so, or when a rank died
  // or gave up, for which it may wait for ever. Then the tracks are not used again.
  bool finish(const shm::Barrier& barrier, Clock::time_point deadline, const std::atomic<bool>& stop);

  const int rank, ranks, device;
  bool one_device = true;  // all have the same
  // Apart: a message that waits keeps no collective from beginning.
  const std::shared_ptr<Track> collectives, messages;
  // Rank r's, as this process has opened them. Of this rank: none.
  cudaEvent_t collective_event(int r, int event) const { return events_[index(r)][index(event)]; }
  cudaEvent_t message_event(int r, int event) const {
    return events_[index(r)][index(Track::kEvents + event)];
  }

 private:
  static std::size_t index(int i) { return static_cast<std::size_t>(i); }
  std::vector<std::vector<cudaEvent_t>> events_;
};

}  // namespace lockstep::cuda_ipc

// Deadlines of what a device still has to do. On CUDA a wait makes a stream wait and returns; the program
// then waits for the device, where no deadline of ours would find it. So whoever has waited leaves the
// engine's work here, and a thread looks whether it is done in time.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <c10/core/Device.h>
#include <lockstep/base/awake_clock.h>
#include <lockstep/base/crew.h>
#include <lockstep/base/error.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace lockstep::detail {

class DeviceWatch {
 public:
  using Clock = AwakeClock;
  // Called at most once, by the watch's thread, and possibly after the watch is gone.
  using Fail = std::function<void(std::string cause, CommError::Kind kind)>;
  DeviceWatch(c10::Device device, Fail fail);
  ~DeviceWatch();  // waits for no device, but for its thread
  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;

  // Works of one engine, in the order they were issued. what: "all_reduce #7".
  void add(c10::intrusive_ptr<c10d::Work> work, std::string what, Clock::time_point begun,
           Clock::time_point deadline);
  // Whether all that was added is done, as far as the device says.
  bool idle() const;

 private:
  struct Entry;
  struct State;
  struct Answer {
    bool complete;
    std::string cause;  // what is wrong with it; empty: nothing
    CommError::Kind kind = CommError::Kind::device;
  };
  static Answer ask(const Entry& entry);
  const std::shared_ptr<State> state_;
  Crew crew_;
};

}  // namespace lockstep::detail

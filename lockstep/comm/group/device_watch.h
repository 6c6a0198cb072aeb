// DeviceWatch: enforces deadlines on work that a device has not finished yet. On CUDA, wait() makes a stream
// wait and returns; the program then waits for the device, where Lockstep cannot enforce a deadline. So
// wait() registers the engine's work here, and a thread checks that it finishes in time.
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
  // Called at most once, on the watch's thread, possibly after the watch was destroyed.
  using Fail = std::function<void(std::string cause, CommError::Kind kind)>;
  DeviceWatch(c10::Device device, Fail fail);
  ~DeviceWatch();  // waits for its thread, not for the device
  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;

  // Adds a work of the engine, in the order of issue. what: "all_reduce #7".
  void add(c10::intrusive_ptr<c10d::Work> work, std::string what, Clock::time_point begun,
           Clock::time_point deadline);
  // True if the device reports that everything added is done.
  bool idle() const;

 private:
  struct Entry;
  struct State;
  struct Answer {
    bool complete;
    std::string cause;  // the error; empty: none
    CommError::Kind kind = CommError::Kind::device;
  };
  static Answer ask(const Entry& entry);
  const std::shared_ptr<State> state_;
  Crew crew_;
};

}  // namespace lockstep::detail

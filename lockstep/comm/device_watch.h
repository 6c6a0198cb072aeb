// Deadlines of what a device still has to do. On CUDA a wait makes a stream wait and returns; the program
// then waits for the device, where no deadline of ours would find it. So whoever has waited leaves the
// engine's work here, and a thread looks whether it is done in time.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include <lockstep/base/awake_clock.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace lockstep::detail {

class DeviceWatch {
 public:
  using Clock = AwakeClock;
  // fail(cause) is called once, by the watch's thread.
  explicit DeviceWatch(std::function<void(std::string cause)> fail) : fail_(std::move(fail)) {}
  ~DeviceWatch();  // waits for no device
  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;

  // Works of one engine, in the order they were issued. what: "all_reduce #7".
  void add(c10::intrusive_ptr<c10d::Work> work, std::string what, Clock::time_point begun,
           Clock::time_point deadline);

 private:
  struct Entry {
    c10::intrusive_ptr<c10d::Work> work;
    std::string what;
    Clock::time_point begun, deadline;
  };
  void look();
  // What is wrong with the oldest; empty: nothing.
  static std::string trouble(const Entry& entry, bool& complete);

  const std::function<void(std::string)> fail_;
  std::mutex mutex_;
  std::condition_variable condition_;
  std::deque<Entry> entries_;
  bool over_ = false;
  std::thread thread_;  // from the first work on
};

}  // namespace lockstep::detail

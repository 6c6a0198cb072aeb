// Observer: receives a callback for every operation of a World. Use it for watchdogs, profilers and byte
// counters.
//
//   struct Bytes : lockstep::Observer {
//     void finished(const lockstep::Call& call, std::chrono::nanoseconds) noexcept override {
//       sum += call.bytes;
//     }
//     std::atomic<std::int64_t> sum = 0;
//   };
//   world.add_observer(std::make_shared<Bytes>());
#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>

#include <lockstep/comm/call.h>

namespace lockstep {

// Callbacks run on the thread that starts, waits for or polls the operation, possibly on several threads at
// once. An observer is local: it must not communicate, block or throw.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void started(const Call& /*call*/) noexcept {}
  // Called when completion is noticed. elapsed counts from the start of the operation.
  virtual void finished(const Call& /*call*/, std::chrono::nanoseconds /*elapsed*/) noexcept {}
  virtual void failed(const Call& /*call*/, std::chrono::nanoseconds /*elapsed*/,
                      std::string_view /*cause*/) noexcept {}
  // The program reported a step (World::step) or progress within one.
  virtual void stepped(std::int64_t /*step*/) noexcept {}
  // The World is about to leave the job.
  virtual void leaving() noexcept {}
};

}  // namespace lockstep

// Sees every operation of a World: watchdogs, profilers and byte counters are observers.
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

// Called on the thread that starts, waits for or polls the operation, possibly from several threads at
// once. An observer is local: it must not communicate, block or throw.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void started(const Call& /*call*/) noexcept {}
  // When its completion is seen; elapsed counts from the start.
  virtual void finished(const Call& /*call*/, std::chrono::nanoseconds /*elapsed*/) noexcept {}
  virtual void failed(const Call& /*call*/, std::chrono::nanoseconds /*elapsed*/,
                      std::string_view /*cause*/) noexcept {}
  // The program has said where it is in its training (World::step), or made its way through a step.
  virtual void stepped(std::int64_t /*step*/) noexcept {}
  // The World is about to be left.
  virtual void leaving() noexcept {}
};

}  // namespace lockstep

// Where a parallel step goes: what each rank computes, sends and waits for, over a window of steps.
//
//   lockstep::Profiler profiler(world, {.first = 10, .last = 20});
//   for (...) { ...; profiler.step(); }
//   profiler.finish();   // on every rank; rank 0 writes profile/trace.json.gz, the summary and the report
//
// `lockstep run --profile ./train` does the same without a line in the program, if that calls world.step(n).
// For another window make another Profiler, when this one's is over.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include <lockstep/base/span.h>
#include <lockstep/comm/world.h>

namespace lockstep {

// Who tells of LibTorch's operators. Callbacks know the thread's processor time and count FLOPs, also where
// ranks are threads. Kineto is LibTorch's own profiler, one for a process: ranks must be processes.
enum class OperatorSource { none, callbacks, kineto };

struct ProfilerOptions {
  // Recorded are the steps that end with the call step(first) to step(last), counted from 1.
  std::int64_t first = 10, last = 20;
  std::string directory = "profile";
  // LibTorch's, one by one; without them what they took counts as the program's code.
  OperatorSource operators = OperatorSource::callbacks;
  bool flops = true;   // of those that callbacks tell of
  bool memory = true;  // of CPU tensors, where Lockstep's allocator gives it
  // Kernels and copies of CUDA's devices, by Kineto, where this process computes on one and ranks are
  // processes.
  bool device = true;
  // Of one rank in one step; for samples and tokens per second. 0: not known.
  std::int64_t samples_per_step = 0, tokens_per_step = 0;
  double peak_flops = 0;  // of what one rank computes on, per second; for MFU. 0: not known
};

namespace profile {
class Session;
}
namespace detail {
class WorldState;
}

class Profiler {
 public:
  // Local. Throws ConfigError where options are not allowed.
  explicit Profiler(World& world, ProfilerOptions options = {});
  ~Profiler();  // writes what there is of this rank
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  // A step has ended. Where it is never called, World::step(n) says so.
  void step();
  // Every rank: writes each one's file, and rank 0 puts them together. Files of hosts that share no folder
  // are put together by `lockstep trace merge`.
  void finish();

 private:
  std::shared_ptr<profile::Session> session_;
  std::weak_ptr<detail::WorldState> world_;  // also when the World is moved
};

// A part of the program by its name, on this thread, until the end of the scope; "optimizer" and "data" count
// as that.
class ProfileRange {
 public:
  explicit ProfileRange(std::string_view name);

 private:
  detail::Span span_;
};

}  // namespace lockstep

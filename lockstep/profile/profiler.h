// Shows where the time of a parallel step goes: what each rank computes, sends and waits for, over a window
// of steps.
//
//   lockstep::Profiler profiler(world, {.first = 10, .last = 20});
//   for (...) { ...; profiler.step(); }
//   profiler.finish();   // on every rank; rank 0 writes profile/trace.json.gz, the summary and the report
//
// `lockstep run --profile ./train` does the same without changes to the program, if it calls world.step(n).
// To record another window, create another Profiler after this one's window is over.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include <lockstep/base/span.h>
#include <lockstep/comm/world.h>

namespace lockstep {

// Source of LibTorch's operators. Callbacks record the thread's CPU time and count FLOPs, and also work if
// ranks are threads. Kineto is LibTorch's own profiler, one per process, so ranks must be processes.
enum class OperatorSource { none, callbacks, kineto };

struct ProfilerOptions {
  // The window: the steps that end with the calls step(first) to step(last), counted from 1.
  std::int64_t first = 10, last = 20;
  std::string directory = "profile";
  // Individual LibTorch operators. With none, their time counts as the program's code.
  OperatorSource operators = OperatorSource::callbacks;
  bool flops = true;   // count FLOPs; needs callbacks
  bool memory = true;  // of CPU tensors, if Lockstep's allocator is used
  // Kernels and copies on CUDA devices, recorded by Kineto; only if this process uses one and ranks are
  // processes.
  bool device = true;
  // Per rank and step, for samples and tokens per second. 0: unknown.
  std::int64_t samples_per_step = 0, tokens_per_step = 0;
  double peak_flops = 0;  // peak FLOP/s of one rank's hardware, for MFU. 0: unknown
};

namespace profile {
class Session;
}
namespace detail {
class WorldState;
}

class Profiler {
 public:
  // Local. Throws ConfigError for invalid options.
  explicit Profiler(World& world, ProfilerOptions options = {});
  ~Profiler();  // writes what this rank has recorded
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  // Marks the end of a step. If it is never called, World::step(n) does that.
  void step();
  // Every rank must call it. Each rank writes its file, and rank 0 combines them. If hosts share no
  // directory, combine the files with `lockstep trace merge`.
  void finish();

 private:
  std::shared_ptr<profile::Session> session_;
  std::weak_ptr<detail::WorldState> world_;  // weak, so that it remains valid if the World is moved
};

// Names a section of the program on this thread, until the end of the scope. The names "optimizer" and "data"
// count as those parts of a step.
class ProfileRange {
 public:
  explicit ProfileRange(std::string_view name);

 private:
  detail::Span span_;
};

}  // namespace lockstep

// Chooses the number of threads and the cores of each rank.
#pragma once

#include <string>
#include <vector>

#include <lockstep/launch/options.h>

namespace lockstep::detail {

using CpuMask = std::vector<unsigned long>;  // In the form sched_setaffinity takes.

struct Placement {
  int threads = 1;
  std::vector<CpuMask> masks;  // One per rank of this host; empty if ranks are not bound.
  std::string text;            // For the start line: "bound to cores 0 | 1", "not bound (2 cores)".
};

// Throws ConfigError if --bind cores asks for more cores than this process may use.
Placement place_ranks(const LaunchOptions& options);

// Disjoint cores for each rank, at least `threads` of them, with neighbouring ranks close together.
// `topology` is hwloc's description of another machine; empty means this one. The machine must have ranks *
// threads cores.
struct Cores {
  std::vector<CpuMask> masks;
  std::vector<std::string> lists;  // "0-3"
};
Cores share_out_cores(int ranks, int threads, const std::string& topology = "");

}  // namespace lockstep::detail

// How many threads each rank has, and which cores.
#pragma once

#include <string>
#include <vector>

#include <lockstep/launch/options.h>

namespace lockstep::detail {

using CpuMask = std::vector<unsigned long>;  // as sched_setaffinity takes it

struct Placement {
  int threads = 1;
  std::vector<CpuMask> masks;  // one for each rank of this host; empty: they are not bound
  std::string text;            // for the start line: "bound to cores 0 | 1", "not bound (2 cores)"
};

// Throws ConfigError where cores are asked for that there are not.
Placement place_ranks(const LaunchOptions& options);

// Each rank's own cores, at least `threads` of them, neighbours close to each other. `topology` is hwloc's
// description of a machine that is not this one. There must be ranks * threads cores.
struct Cores {
  std::vector<CpuMask> masks;
  std::vector<std::string> lists;  // "0-3"
};
Cores share_out_cores(int ranks, int threads, const std::string& topology = "");

}  // namespace lockstep::detail

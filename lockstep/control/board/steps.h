// Step times of a rank, and the job's status derived from them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::control {

// Consecutive steps of a rank: one, or several if they are short.
struct StepTime {
  std::int64_t step = -1;  // The last of them.
  std::int64_t steps = 1;
  std::int64_t took_us = 0, waited_us = 0;  // Totals; waited: for peers, inside operations.
};

struct Metric {
  std::string name = {};
  double value = 0;
  std::int64_t step = -1;  // -1: none.
};

// The job's current status, for one line.
struct Status {
  std::int64_t step = -1;
  double steps_per_second = 0;  // 0: not known yet.
  double waiting = -1;          // Fraction of a step that ranks wait for each other; below 0: not known.
  // The rank with the longest steps, not counting its waits; -1: not known.
  int slowest = -1;
  double slowness = 1;               // Its steps relative to its peers'.
  std::vector<Metric> metrics = {};  // The latest ones of rank 0.
};

}  // namespace lockstep::control

// How a rank's steps went, and what becomes of that for the person.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::control {

// Some steps of a rank in a row: one, or several where they are short.
struct StepTime {
  std::int64_t step = -1;  // the last of them
  std::int64_t steps = 1;
  std::int64_t took_us = 0, waited_us = 0;  // all of them; waited: for others, inside operations
};

struct Metric {
  std::string name = {};
  double value = 0;
  std::int64_t step = -1;  // -1: none
};

// The whole job at this moment, for one line.
struct Status {
  std::int64_t step = -1;
  double steps_per_second = 0;       // 0: not known yet
  double waiting = -1;               // the share of a step that ranks wait for others; below 0: not known
  int slowest = -1;                  // the rank whose steps are the longest, without its waits; -1: not known
  double slowness = 1;               // its steps beside the others'
  std::vector<Metric> metrics = {};  // the last of rank 0
};

}  // namespace lockstep::control

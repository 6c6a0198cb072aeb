// Operations on sets of time intervals.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace lockstep::profile {

struct Interval {
  std::int64_t begin, end;
};
using Intervals = std::vector<Interval>;

// Merges intervals that touch or overlap.
inline Intervals united(Intervals all) {
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  Intervals joined;
  for (const auto& each : all) {
    if (each.end <= each.begin) continue;
    if (!joined.empty() && each.begin <= joined.back().end)
      joined.back().end = std::max(joined.back().end, each.end);
    else
      joined.push_back(each);
  }
  return joined;
}

// Length of the part of [begin, end) that `joined`, which is sorted and disjoint, covers.
inline std::int64_t covered(const Intervals& joined, std::int64_t begin, std::int64_t end) {
  auto at =
      std::partition_point(joined.begin(), joined.end(), [&](const auto& each) { return each.end <= begin; });
  std::int64_t sum = 0;
  for (; at != joined.end() && at->begin < end; ++at)
    sum += std::min(at->end, end) - std::max(at->begin, begin);
  return sum;
}

inline std::int64_t covered(const Intervals& joined, const Intervals& where) {
  std::int64_t sum = 0;
  for (const auto& each : where) sum += covered(joined, each.begin, each.end);
  return sum;
}

inline Intervals clipped(const Intervals& all, std::int64_t begin, std::int64_t end) {
  Intervals inside;
  for (const auto& each : all)
    if (each.end > begin && each.begin < end)
      inside.push_back({std::max(each.begin, begin), std::min(each.end, end)});
  return inside;
}

inline double milliseconds(std::int64_t nanoseconds) { return static_cast<double>(nanoseconds) / 1e6; }

}  // namespace lockstep::profile

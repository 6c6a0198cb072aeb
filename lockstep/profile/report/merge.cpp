#include <lockstep/profile/report/merge.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <utility>

namespace lockstep::profile {

namespace {

// True for operations that end on a rank only after every rank has begun.
bool meets_all(Operation operation) {
  return operation == Operation::all_reduce || operation == Operation::all_gather ||
         operation == Operation::reduce_scatter || operation == Operation::all_to_all ||
         operation == Operation::barrier;
}

struct Attendance {
  std::int64_t begin = 0, end = 0;
};
using Meetings =
    std::map<std::pair<std::int64_t, std::uint64_t>, std::vector<Attendance>>;  // group, sequence

Meetings meetings_of(const std::vector<RankProfile>& profiles, const std::string& boot) {
  Meetings arrivals_of;
  for (const auto& profile : profiles) {
    if (profile.boot != boot) continue;
    for (const auto& transfer : profile.transfers)
      if (meets_all(transfer.operation) && !transfer.unfinished)
        arrivals_of[{profile.groups[static_cast<std::size_t>(transfer.group)].key, transfer.sequence}]
            .push_back({profile.origin + transfer.begin, profile.origin + transfer.end});
  }
  return arrivals_of;
}

}  // namespace

ClockBounds clock_bounds(const std::vector<RankProfile>& profiles, const std::string& boot,
                         const std::string& reference) {
  ClockBounds bounds{std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max(), 0};
  const auto theirs = meetings_of(profiles, boot), ours = meetings_of(profiles, reference);
  for (const auto& [which, them] : theirs) {
    const auto found = ours.find(which);
    if (found == ours.end()) continue;
    ++bounds.arrivals_of;
    for (const auto& they : them)
      for (const auto& we : found->second) {
        bounds.most = std::min(bounds.most, we.end - they.begin);
        bounds.least = std::max(bounds.least, we.begin - they.end);
      }
  }
  return bounds;
}

void align_clocks(std::vector<RankProfile>& profiles) {
  std::set<std::string> boots;
  for (const auto& profile : profiles) boots.insert(profile.boot);
  const std::string reference = profiles.front().boot;
  boots.erase(reference);
  std::map<std::string, std::int64_t> behind;
  for (const auto& boot : boots) {
    const auto bounds = clock_bounds(profiles, boot, reference);
    if (bounds.arrivals_of > 0) {
      behind[boot] = bounds.least + (bounds.most - bounds.least) / 2;
      continue;
    }
    // No common collectives: align the beginnings of the windows.
    const auto first = std::find_if(profiles.begin(), profiles.end(),
                                    [&](const auto& profile) { return profile.boot == boot; });
    behind[boot] = profiles.front().origin - first->origin;
  }
  for (auto& profile : profiles)
    if (const auto found = behind.find(profile.boot); found != behind.end()) profile.origin += found->second;
}

}  // namespace lockstep::profile

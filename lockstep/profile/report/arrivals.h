// Arrival times of the ranks at collectives.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/profile/record/rank_profile.h>

namespace lockstep::profile {

using CollectiveKey = std::pair<std::int64_t, std::uint64_t>;  // group, sequence

struct Arrivals {
  struct Of {
    int rank;
    std::int64_t begin;  // on the common clock of all ranks
  };
  std::vector<Of> ranks;  // in rank order
  std::int64_t last_end = 0;

  const Of& first() const;
  const Of& last() const;
  std::int64_t middle() const;
};
using ArrivalsByCollective = std::map<CollectiveKey, Arrivals>;

const GroupOf& group_of(const RankProfile& profile, const Transfer& transfer);
ArrivalsByCollective arrivals_of(const std::vector<RankProfile>& profiles);

// Text for the args of a trace: each rank's delay after the first, in ms; with many ranks, only the last
// one's.
//   {"0":0.000,"1":20.113}     {"first":3,"last":61,"last_after":20.113}
std::string arrival_text(const Arrivals& arrivals);

}  // namespace lockstep::profile

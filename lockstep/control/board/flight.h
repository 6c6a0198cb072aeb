// The flight record: the last operations of all ranks of a job, and how the ranks ended. After a failure the
// agents gather it when the ranks have ended, and the coordinator merges it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/control/board/flight_ring.h>
#include <lockstep/control/wire/failure.h>
#include <lockstep/control/wire/messages.h>

namespace lockstep::control {

struct RankFlight {
  int pid = 0;
  std::optional<Ended> ended = {};
  std::string error = {};  // Reported by the rank: an exception, or a failed operation.
  FlightLog log = {};      // Times are nanoseconds since 1970, so that hosts can be compared.

  // Encodes at most that many of the last operations, and no more than a frame holds.
  std::string encode(std::size_t most = FlightRing::kKept) const;
  static RankFlight decode(std::string_view payload);
};

struct FlightRecord {
  int attempt = 0, world_size = 0;
  std::optional<Failure> failure = {};
  std::map<std::int64_t, GroupMade> groups = {};  // By key; groups that ended long ago are missing.
  std::map<int, RankFlight> ranks = {};           // The ranks that reported.
};

}  // namespace lockstep::control

// The flight record: the last operations of all ranks of a job, and how they ended. Gathered by the agents
// when the ranks have ended and not all is well, and brought together by the head.
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
  std::string error = {};  // that it told of: an exception, an operation that failed
  FlightLog log = {};      // times are nanoseconds since 1970, so that hosts can be compared

  // As many of the last operations as that, and as a frame has room for.
  std::string encode(std::size_t most = FlightRing::kKept) const;
  static RankFlight decode(std::string_view payload);
};

struct FlightRecord {
  int attempt = 0, world_size = 0;
  std::optional<Failure> failure = {};
  std::map<std::int64_t, GroupMade> groups = {};  // by key; those that were gone long ago are not known
  std::map<int, RankFlight> ranks = {};           // that were heard from
};

}  // namespace lockstep::control

// Judges a flight record: which rank diverged first, and where.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <lockstep/control/board/flight.h>

namespace lockstep::detail {

struct FlightVerdict {
  enum class Kind {
    agree,         // The recorded calls agree.
    ended,         // They agree, and this rank was the first to end.
    differs,       // It made another call than its peers.
    did_not_come,  // Peers waited for it in an operation.
    no_partner,    // A peer waited for its side of a message.
  };
  Kind kind = Kind::agree;
  // World ranks that diverged; several if it cannot be determined which of them did.
  std::vector<int> ranks = {};
  // Of the operation that shows the divergence (ended: the rank's last one). site: where the first of `ranks`
  // was then; empty if it had begun none.
  std::string group = {}, operation = {}, site = {};
  std::int64_t sequence = -1;
  std::string text = {};  // The whole verdict, for the user.
};

const char* name(FlightVerdict::Kind kind);

FlightVerdict judge(const control::FlightRecord& record);

// "all_reduce #41 of group 'world' (float32, 1000 elements, sum) at train.cpp:88"
std::string describe(const control::FlightRecord& record, const control::FlightEntry& entry);
// The part in parentheses: "float32, 1000 elements, sum"; "float32, 10 elements, to rank 3".
std::string details(const control::FlightRecord& record, const control::FlightEntry& entry);
std::string duration_text(std::int64_t ns);  // "12.3 us", "4.1 ms", "3.200 s"
std::string group_name(const control::FlightRecord& record, std::int64_t key);

}  // namespace lockstep::detail

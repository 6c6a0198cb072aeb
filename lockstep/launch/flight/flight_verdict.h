// What a flight record says: which rank diverged first from the others, and where.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <lockstep/control/board/flight.h>

namespace lockstep::detail {

struct FlightVerdict {
  enum class Kind {
    agree,         // as far as is recorded
    ended,         // so they do, and this one was the first to end
    differs,       // a call that the others did not make
    did_not_come,  // others waited for it in an operation
    no_partner,    // others waited for its part of a message
  };
  Kind kind = Kind::agree;
  std::vector<int> ranks = {};  // of the world, who diverged; several where it cannot be said which of them
  // Of the operation in which it shows (ended: its last); site: where the first of ranks was then, empty
  // where it had begun none.
  std::string group = {}, operation = {}, site = {};
  std::int64_t sequence = -1;
  std::string text = {};  // all of it, for a person
};

const char* name(FlightVerdict::Kind kind);

FlightVerdict judge(const control::FlightRecord& record);

// "all_reduce #41 of group 'world' (float32, 1000 elements, sum) at train.cpp:88"
std::string describe(const control::FlightRecord& record, const control::FlightEntry& entry);
// In brackets there: "float32, 1000 elements, sum"; "float32, 10 elements, to rank 3".
std::string details(const control::FlightRecord& record, const control::FlightEntry& entry);
std::string duration_text(std::int64_t ns);  // "12.3 us", "4.1 ms", "3.200 s"
std::string group_name(const control::FlightRecord& record, std::int64_t key);

}  // namespace lockstep::detail

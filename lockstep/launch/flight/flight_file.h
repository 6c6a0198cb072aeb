// The flight record as a JSON file: written after a failure by `lockstep run`, read by `lockstep trace
// flight`.
#pragma once

#include <string>
#include <string_view>

#include <lockstep/control/board/flight.h>

namespace lockstep::detail {

std::string flight_json(const control::FlightRecord& record);
// Throws ConfigError that says what is wrong: anybody may have written it. `file` names it there.
control::FlightRecord parse_flight(std::string_view text, const std::string& file);

}  // namespace lockstep::detail

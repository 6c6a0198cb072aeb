// Writes and reads the flight record as a JSON file: `lockstep run` saves it after a failure, and `lockstep
// trace flight` reads it.
#pragma once

#include <string>
#include <string_view>

#include <lockstep/control/board/flight.h>

namespace lockstep::detail {

std::string flight_json(const control::FlightRecord& record);
// Throws a ConfigError that states what is wrong: the file is untrusted input. `file` is its name in the
// error.
control::FlightRecord parse_flight(std::string_view text, const std::string& file);

}  // namespace lockstep::detail

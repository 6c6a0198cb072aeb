// Keeps the flight record of a failed attempt and saves it for `lockstep run`.
#pragma once

#include <mutex>
#include <optional>
#include <string>

#include <lockstep/control/board/flight.h>
#include <lockstep/launch/options.h>

namespace lockstep::detail {

class FlightKeeper {
 public:
  explicit FlightKeeper(const LaunchOptions& options) : options_(options) {}

  void take(control::FlightRecord record);  // Thread-safe.
  // Writes the record if there is anything to report. Returns a line with the file and the verdict.
  std::optional<std::string> save();

 private:
  // Opens the file of that attempt; creates a new one if the user named none.
  std::pair<std::string, int> open(int attempt) const;

  const LaunchOptions& options_;
  std::mutex mutex_;
  std::optional<control::FlightRecord> taken_;
};

}  // namespace lockstep::detail

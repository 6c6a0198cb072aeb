// Where `lockstep run` puts the flight record of an attempt that failed.
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

  void take(control::FlightRecord record);  // any thread
  // Writes what was taken, if there is something to tell: the line that says so, and who diverged first.
  std::optional<std::string> save();

 private:
  // A file of that attempt, made new where nobody said where.
  std::pair<std::string, int> open(int attempt) const;

  const LaunchOptions& options_;
  std::mutex mutex_;
  std::optional<control::FlightRecord> taken_;
};

}  // namespace lockstep::detail

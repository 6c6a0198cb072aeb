// A pipeline schedule as a picture: time from left to right, a row for each rank.
#pragma once

#include <string>

#include <lockstep/schedule/schedule.h>

namespace lockstep::cli {

// For terminals. Every action is as wide as it takes time; colors: where the terminal has them.
std::string drawn_as_text(const PipelineSchedule& schedule, const SimulatedSchedule& run, bool colors);
std::string drawn_as_svg(const PipelineSchedule& schedule, const SimulatedSchedule& run,
                         const std::string& title);

}  // namespace lockstep::cli

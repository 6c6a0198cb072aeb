// Draws a pipeline schedule: time from left to right, one row per rank.
#pragma once

#include <string>

#include <lockstep/schedule/schedule.h>

namespace lockstep::cli {

// For terminals: an action's width is proportional to its time. colors: use the terminal's colours.
std::string drawn_as_text(const PipelineSchedule& schedule, const SimulatedSchedule& run, bool colors);
std::string drawn_as_svg(const PipelineSchedule& schedule, const SimulatedSchedule& run,
                         const std::string& title);

}  // namespace lockstep::cli

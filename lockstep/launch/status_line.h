// Formats the status line: "step 120 | 9.8 steps/s | loss 0.25 | 627 samples/s | waiting 12% | slowest rank 2
// (1.3x)".
#pragma once

#include <string>
#include <string_view>

#include <lockstep/control/board/steps.h>

namespace lockstep::detail {

std::string status_text(const control::Status& status);
// Returns the beginning that fits. A character outside ASCII counts as two columns.
std::string cut_to_columns(std::string_view text, int columns);

}  // namespace lockstep::detail

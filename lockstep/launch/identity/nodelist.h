// SLURM's way to write many hosts in few characters: "gpu[01-03,7],login" is gpu01, gpu02, gpu03, gpu7,
// login.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::detail {

// The hosts, in the order written. `what` names the text in errors: a ConfigError for anything that is not
// such a list, and for lists beyond what any machine has.
std::vector<std::string> expand_nodelist(std::string_view what, std::string_view text);

}  // namespace lockstep::detail

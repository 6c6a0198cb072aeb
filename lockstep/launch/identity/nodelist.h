// SLURM's compact notation for lists of hosts: "gpu[01-03,7],login" is gpu01, gpu02, gpu03, gpu7, login.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::detail {

// Returns the hosts in the order written. Throws a ConfigError, in which `what` names the text, for anything
// that is not such a list, and for lists beyond any real machine.
std::vector<std::string> expand_nodelist(std::string_view what, std::string_view text);

}  // namespace lockstep::detail

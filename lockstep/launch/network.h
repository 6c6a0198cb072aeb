// Ports and interfaces, as far as a launcher cares.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace lockstep::detail {

// A port of this host that was free a moment ago. Nobody listens there: programs that make a store of their
// own at MASTER_PORT can.
int free_port();

// The same on every host that was told the same port.
int port_beside(int port);

// "host:29500", "[fe80::1]:29500"; `what` names it in the ConfigError that says what is wrong.
std::pair<std::string, int> parse_endpoint(const std::string& what, const std::string& text);

std::vector<std::string> network_interfaces();

}  // namespace lockstep::detail

// Ports and network interfaces for the launcher.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace lockstep::detail {

// Returns a port of this host that was free a moment ago. Nothing listens on it, so programs that create
// their own store at MASTER_PORT can bind it.
int free_port();

// A port next to the given one; the same on every host.
int port_beside(int port);

// Parses "host:29500" or "[fe80::1]:29500"; `what` names the option in the ConfigError.
std::pair<std::string, int> parse_endpoint(const std::string& what, const std::string& text);

std::vector<std::string> network_interfaces();

}  // namespace lockstep::detail

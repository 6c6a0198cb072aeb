// Which engine serves which device.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/comm/group/group_state.h>
#include <lockstep/launch/identity/identity.h>

namespace lockstep::detail {

class ThreadsJob;
using Backends = std::map<at::DeviceType, std::string>;

// "auto", a name, or "cpu:gloo,cuda:nccl"; ConfigError names what is allowed.
void check_backend_text(const std::string& text, bool threads);
// The same, resolved for this host's devices. Which serves the CPU may depend on a group's hosts.
Backends choose_backends(const std::string& text, const Identity& identity, const std::vector<int>& nodes,
                         bool threads);
// This rank's GPU, where one of them serves CUDA.
std::optional<int> choose_device(const Backends& backends, const Identity& identity);
// The host of each rank: as found, or as LOCKSTEP_NODES says. ConfigError where that is not possible.
std::vector<int> choose_nodes(std::vector<int> found);

Transports make_transports(const Backends& backends, const TransportContext& context, ThreadsJob* threads);

}  // namespace lockstep::detail

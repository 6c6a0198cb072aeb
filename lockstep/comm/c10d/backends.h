// Chooses the engine for each device.
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

// Throws ConfigError, listing the valid names, unless text is "auto", a backend's name, or
// "cpu:gloo,cuda:nccl".
void check_backend_text(const std::string& text, bool threads);
// Resolves the text for this host's devices. The engine for the CPU may still depend on the hosts of a group.
Backends choose_backends(const std::string& text, const Identity& identity, const std::vector<int>& nodes,
                         bool threads);
// This rank's GPU, if an engine serves CUDA.
std::optional<int> choose_device(const Backends& backends, const Identity& identity);
// Host of each rank, as found or as set in LOCKSTEP_NODES. Throws ConfigError if that is not possible.
std::vector<int> choose_nodes(std::vector<int> found);

Transports make_transports(const Backends& backends, const TransportContext& context, ThreadsJob* threads);

}  // namespace lockstep::detail

// Ranks that need LibTorch: Lockstep's transports and LibTorch's Gloo.
#pragma once

#include <memory>
#include <string>

#include "rank.h"

namespace lockstep::bench {

// Through Group, as in programs.
std::unique_ptr<Engine> make_group_engine(const std::string& backend);
// LibTorch's ProcessGroupGloo itself. The ranks rendezvous through the file `store`.
std::unique_ptr<Engine> make_gloo_engine(int rank, int ranks, const std::string& store);

}  // namespace lockstep::bench

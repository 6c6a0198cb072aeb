// Ranks that LibTorch is needed for: Lockstep's transports and LibTorch's Gloo.
#pragma once

#include <memory>
#include <string>

#include "rank.h"

namespace lockstep::bench {

// Through Group, as programs use it.
std::unique_ptr<Engine> make_group_engine(const std::string& backend);
// LibTorch's ProcessGroupGloo itself. The ranks meet in the file `store`.
std::unique_ptr<Engine> make_gloo_engine(int rank, int ranks, const std::string& store);

}  // namespace lockstep::bench

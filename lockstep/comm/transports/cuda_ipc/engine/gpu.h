// Identifies GPUs, because ranks may see different GPUs under the same number. Does not use CUDA's headers.
#pragma once

#include <string>

namespace lockstep::detail {

// "GPU-5d5e63ec-...": the same in every process. The device must exist.
std::string gpu_of(int device);

}  // namespace lockstep::detail

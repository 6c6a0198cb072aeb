// Which GPU it is, for ranks that see different ones under the same number. Without CUDA's headers.
#pragma once

#include <string>

namespace lockstep::detail {

// "GPU-5d5e63ec-...": the same in every process. There must be such a device.
std::string gpu_of(int device);

}  // namespace lockstep::detail

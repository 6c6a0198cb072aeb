// What any CPU runs. Where it has no fused multiply-add, the C library works it out: slow, and the same bits.
#include <lockstep/optim/update/vector.h>

namespace lockstep::detail {

const UpdateKernels kUpdatePortable = kKernels;

}  // namespace lockstep::detail

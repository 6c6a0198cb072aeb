// Kernels for any CPU. Without hardware FMA, the C library emulates it: slower, with the same bits.
#include <lockstep/optim/update/vector.h>

namespace lockstep::detail {

const UpdateKernels kUpdatePortable = kKernels;

}  // namespace lockstep::detail

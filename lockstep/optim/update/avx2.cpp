// Kernels for CPUs with AVX2 and FMA; CMakeLists.txt sets the compiler options. Wider vectors do not help:
// memory bandwidth is the limit, and on Zen 4 they were measured to be 10 % slower.
#if defined(__x86_64__)
#include <lockstep/optim/update/vector.h>

namespace lockstep::detail {

const UpdateKernels kUpdateAvx2 = kKernels;

}  // namespace lockstep::detail
#endif

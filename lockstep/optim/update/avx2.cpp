// For CPUs with AVX2 and FMA; CMakeLists.txt has the options. Wider vectors gain nothing: memory is the
// limit, and where they were measured (Zen 4) they were a tenth slower.
#if defined(__x86_64__)
#include <lockstep/optim/update/vector.h>

namespace lockstep::detail {

const UpdateKernels kUpdateAvx2 = kKernels;

}  // namespace lockstep::detail
#endif

// For CPUs with AVX2 and FMA; lockstep/CMakeLists.txt has the options.
#if defined(__x86_64__)
#include <lockstep/train/update_vector.h>

namespace lockstep::detail {

const UpdateKernels kUpdateAvx2 = kKernels;

}  // namespace lockstep::detail
#endif

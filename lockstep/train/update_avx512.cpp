// For CPUs with AVX-512 F, BW, DQ and VL; lockstep/CMakeLists.txt has the options.
#if defined(__x86_64__)
#include <lockstep/train/update_vector.h>

namespace lockstep::detail {

const UpdateKernels kUpdateAvx512 = kKernels;

}  // namespace lockstep::detail
#endif

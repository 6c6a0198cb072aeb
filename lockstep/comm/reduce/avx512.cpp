// For CPUs with AVX-512 F, BW, DQ and VL; lockstep/comm/reduce/options.cmake sets the compiler options.
#if defined(__x86_64__)
#define LOCKSTEP_VECTOR_BYTES 64
#define LOCKSTEP_UNROLL 4
#include <lockstep/comm/reduce/vector.h>

namespace lockstep::detail {

bool fold_avx512(Number number, Fold fold, const FoldJob& job) { return fold_any(number, fold, job); }
bool convert_avx512(Number number, const ConvertJob& job) { return convert_any(number, job); }

}  // namespace lockstep::detail
#endif

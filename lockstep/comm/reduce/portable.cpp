// Runs on any CPU: nearly all have vector registers of 16 bytes.
#define LOCKSTEP_VECTOR_BYTES 16
#define LOCKSTEP_UNROLL 2
#include <lockstep/comm/reduce/vector.h>

namespace lockstep::detail {

bool fold_portable(Number number, Fold fold, const FoldJob& job) { return fold_any(number, fold, job); }
bool convert_portable(Number number, const ConvertJob& job) { return convert_any(number, job); }

}  // namespace lockstep::detail

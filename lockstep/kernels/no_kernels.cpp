// Built where there is no nvcc, or LibTorch has no CUDA.
#include <stdexcept>

#include <lockstep/kernels/fold.h>
#include <lockstep/kernels/kernels.h>

namespace lockstep::kernels {
namespace {

[[noreturn]] void missing() { throw std::logic_error("this build of lockstep has no CUDA kernels"); }

}  // namespace

bool available() { return false; }
std::size_t column_sum_scratch(std::int64_t, std::int64_t) { missing(); }
void column_sums(Number, const void*, std::int64_t, std::int64_t, void*, float*, Stream) { missing(); }
bool fold(detail::Number, detail::Fold, const detail::FoldJob&, Stream) { missing(); }

}  // namespace lockstep::kernels

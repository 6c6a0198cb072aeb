// Stubs for builds without nvcc or with a LibTorch without CUDA.
#include <stdexcept>

#include <lockstep/kernels/kernels.h>

namespace lockstep::kernels {
namespace {

[[noreturn]] void missing() { throw std::logic_error("this build of Lockstep has no CUDA kernels"); }

}  // namespace

bool available() { return false; }
std::size_t column_sum_scratch(std::int64_t, std::int64_t) { missing(); }
void column_sums(Number, const void*, std::int64_t, std::int64_t, void*, float*, Stream) { missing(); }
void layer_norm(const LayerNorm&, Stream) { missing(); }
std::size_t layer_norm_scratch(std::int64_t, std::int64_t) { missing(); }
void layer_norm_gradient(const LayerNormGradient&, Stream) { missing(); }
void gelu(Number, const void*, std::int64_t, void*, Stream) { missing(); }
void gelu_gradient(Number, const void*, const void*, std::int64_t, std::int64_t, void*, void*, float*,
                   Stream) {
  missing();
}
void cross_entropy(const CrossEntropy&, Stream) { missing(); }
void scale(const float*, std::int64_t, const float*, Number, void*, Stream) { missing(); }
void pack_heads(const PackHeads&, Stream) { missing(); }
void adam(const AdamCall&, std::span<const AdamTensor>, Stream) { missing(); }
void put_adam_settings(const AdamSettings&, AdamSettings*, Stream) { missing(); }

}  // namespace lockstep::kernels

// Packs three gradients side by side, the layout of the layer that produced queries, keys and values
// together.
#include <lockstep/kernels/device.cuh>

namespace lockstep::kernels {
namespace {

// Each thread copies 16 bytes; all sizes are in units of 16 bytes.
struct Rows {
  const int4* from[3];
  std::int64_t strides[3][3];
  int4* to;
  std::int64_t batch, heads, length, size;
};

__global__ void pack_rows(Rows r) {
  const auto total = r.batch * r.length * 3 * r.heads * r.size;
  for (auto at = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; at < total;
       at += std::int64_t{gridDim.x} * blockDim.x) {
    auto rest = at;
    const auto i = rest % r.size;
    rest /= r.size;
    const auto head = rest % r.heads;
    rest /= r.heads;
    const auto which = rest % 3;
    rest /= 3;
    const auto token = rest % r.length, sample = rest / r.length;
    const auto* strides = r.strides[which];
    __stcs(r.to + at,
           __ldcs(r.from[which] + sample * strides[0] + head * strides[1] + token * strides[2] + i));
  }
}

}  // namespace

void pack_heads(const PackHeads& pack, Stream stream) {
  const std::int64_t unit = 16 / (pack.number == Number::float32 ? 4 : 2);
  Rows rows{{}, {}, static_cast<int4*>(pack.to), pack.batch, pack.heads, pack.length, pack.size / unit};
  for (int which = 0; which < 3; ++which) {
    rows.from[which] = static_cast<const int4*>(pack.from[which]);
    for (int axis = 0; axis < 3; ++axis) rows.strides[which][axis] = pack.strides[which][axis] / unit;
  }
  constexpr int kThreads = 256;
  const auto total = rows.batch * rows.length * 3 * rows.heads * rows.size;
  const auto blocks =
      static_cast<unsigned>(std::min<std::int64_t>((total + kThreads - 1) / kThreads, 132 * 64));
  pack_rows<<<blocks, kThreads, 0, of(stream)>>>(rows);
  check_launch("pack_rows");
}

}  // namespace lockstep::kernels

// LayerNorm of a sum, and its gradient. A block processes one row at a time, each thread eight columns of it.
#include <algorithm>

#include <lockstep/kernels/columns.cuh>

namespace lockstep::kernels {
namespace {

constexpr int kMostThreads = kMostNormColumns / 8, kMostWarps = kMostThreads / 32, kFewThreads = 512;

int threads_for(std::int64_t columns) { return static_cast<int>((columns / 8 + 31) / 32 * 32); }

// Sums over a block. Consecutive rows alternate between two shared buffers, so one barrier per row is enough.
struct RowSums {
  float (*shared)[kMostWarps][2];
  int turn = 0;
  __device__ float2 operator()(float a, float b) {
    a = warp_sum(a), b = warp_sum(b);
    const int warps = blockDim.x / 32;
    if (warps == 1) return {a, b};
    auto* mine = shared[turn];
    turn ^= 1;
    if (threadIdx.x % 32 == 0) mine[threadIdx.x / 32][0] = a, mine[threadIdx.x / 32][1] = b;
    __syncthreads();
    a = b = 0;
    for (int w = 0; w < warps; ++w) a += mine[w][0], b += mine[w][1];
    return {a, b};
  }
};

// kThreads: maximum number of threads. The more threads, the fewer registers each may use.
template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads) norm_rows(LayerNorm n) {
  __shared__ float shared[2][kMostWarps][2];
  RowSums row_sums{shared};
  const int column = threadIdx.x * 8;
  const bool inside = column < n.columns;
  float weight[8], bias[8];
  const bool affine = n.weight != nullptr;
  if (affine && inside) {
    load8(static_cast<const T*>(n.weight) + column, weight);
    load8(static_cast<const T*>(n.bias) + column, bias);
  }
  for (std::int64_t row = blockIdx.x; row < n.rows; row += gridDim.x) {
    const auto at = row * n.columns + column;
    float x[8] = {};
    if (inside) {
      load8(static_cast<const T*>(n.x) + at, x);
      if (n.residual != nullptr) {
        float other[8];
        load8(static_cast<const T*>(n.residual) + at, other);
#pragma unroll
        // Normalise the sum as it is stored (rounded to T), because backward reads that.
        for (int i = 0; i < 8; ++i) x[i] = to_float(from_float<T>(x[i] + other[i]));
        store8(static_cast<T*>(n.sum) + at, x);
      }
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += x[i];
    const float mean = row_sums(sum, 0).x / n.columns;
    float squares = 0;
    if (inside)
#pragma unroll
      for (int i = 0; i < 8; ++i) squares += (x[i] - mean) * (x[i] - mean);
    const float rstd = rsqrtf(row_sums(squares, 0).x / n.columns + static_cast<float>(n.eps));
    if (inside) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i] = (x[i] - mean) * rstd;
        if (affine) x[i] = x[i] * weight[i] + bias[i];
      }
      store8(static_cast<T*>(n.out) + at, x);
    }
    if (threadIdx.x == 0) n.mean[row] = mean, n.rstd[row] = rstd;
  }
}

template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads) norm_gradient_rows(LayerNormGradient n) {
  __shared__ float shared[2][kMostWarps][2];
  RowSums row_sums{shared};
  const int column = threadIdx.x * 8;
  const bool inside = column < n.columns;
  float weight[8], dweight[8] = {}, dbias[8] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) weight[i] = 1;
  if (n.weight != nullptr && inside) load8(static_cast<const T*>(n.weight) + column, weight);
  for (std::int64_t row = blockIdx.x; row < n.rows; row += gridDim.x) {
    const auto at = row * n.columns + column;
    float x[8] = {}, dout[8] = {}, dsum[8] = {};
    float through = 0, along = 0;
    const float mean = n.mean[row], rstd = n.rstd[row];
    if (inside) {
      load8(static_cast<const T*>(n.sum) + at, x);
      load8(static_cast<const T*>(n.dout) + at, dout);
      if (n.dsum != nullptr) load8(static_cast<const T*>(n.dsum) + at, dsum);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i] = (x[i] - mean) * rstd;
        dweight[i] += dout[i] * x[i];
        dbias[i] += dout[i];
        dout[i] *= weight[i];
        through += dout[i];
        along += dout[i] * x[i];
      }
    }
    const auto sums = row_sums(through, along);
    if (inside) {
      through = sums.x / n.columns, along = sums.y / n.columns;
#pragma unroll
      for (int i = 0; i < 8; ++i) dsum[i] += (dout[i] - through - x[i] * along) * rstd;
      store8(static_cast<T*>(n.dx) + at, dsum);
    }
  }
  if (inside && n.dweight != nullptr) {
    store8(n.scratch + blockIdx.x * n.columns + column, dweight);
    store8(n.scratch + (gridDim.x + blockIdx.x) * n.columns + column, dbias);
  }
}

// Few enough that adding up their parts is cheap, enough to fill a device.
int gradient_blocks(std::int64_t rows, std::int64_t columns) {
  const std::int64_t most = std::max<std::int64_t>(132 * 768 / threads_for(columns), 132);
  return static_cast<int>(std::min(rows, most));
}

}  // namespace

void layer_norm(const LayerNorm& norm, Stream stream) {
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(norm.rows, 132 * 64));
  const int threads = threads_for(norm.columns);
  with_type(norm.number, [&]<typename T>(T) {
    if (threads <= kFewThreads)
      norm_rows<T, kFewThreads><<<blocks, threads, 0, of(stream)>>>(norm);
    else
      norm_rows<T, kMostThreads><<<blocks, threads, 0, of(stream)>>>(norm);
  });
  check_launch("norm_rows");
}

std::size_t layer_norm_scratch(std::int64_t rows, std::int64_t columns) {
  return 2 * static_cast<std::size_t>(gradient_blocks(rows, columns)) * static_cast<std::size_t>(columns);
}

void layer_norm_gradient(const LayerNormGradient& norm, Stream stream) {
  const int blocks = gradient_blocks(norm.rows, norm.columns), threads = threads_for(norm.columns);
  with_type(norm.number, [&]<typename T>(T) {
    if (threads <= kFewThreads)
      norm_gradient_rows<T, kFewThreads><<<blocks, threads, 0, of(stream)>>>(norm);
    else
      norm_gradient_rows<T, kMostThreads><<<blocks, threads, 0, of(stream)>>>(norm);
  });
  check_launch("norm_gradient_rows");
  if (norm.dweight == nullptr) return;
  add_column_parts(norm.number, norm.scratch, blocks, norm.columns, norm.dweight, norm.dbias, stream);
}

}  // namespace lockstep::kernels

// Sums over the rows of a matrix in two stages: each block sums one band of rows over 256 columns, then the
// bands are added in order.
#pragma once

#include <algorithm>

#include <lockstep/kernels/device.cuh>

namespace lockstep::kernels {

// Number of bands for a matrix; depends only on the number of rows.
int column_parts(std::int64_t rows);
// Adds up the parts. The second half of scratch goes to `second` unless that is null.
void add_column_parts(Number number, const float* scratch, int parts, std::int64_t columns, void* first,
                      void* second, Stream stream);

constexpr int kColumnWarps = 8;

// Calls row_values for eight columns of a row and sums what it returns. row_values may have side effects.
template <typename Row>
__global__ void __launch_bounds__(32 * kColumnWarps)
    sum_bands(Row row_values, std::int64_t rows, std::int64_t columns, float* scratch) {
  __shared__ float shared[kColumnWarps][256 + 8];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto column = blockIdx.x * std::int64_t{256} + lane * 8;
  const auto band = (rows + gridDim.y - 1) / gridDim.y;
  const auto first = blockIdx.y * band, last = min(rows, first + band);
  float sums[8] = {};
  if (column < columns) {
#pragma unroll 4
    for (auto row = first + warp; row < last; row += kColumnWarps) {
      float values[8];
      row_values(row, column, values);
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i] += values[i];
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) shared[warp][lane * 8 + i] = sums[i];
  __syncthreads();
  for (int i = threadIdx.x; i < 256; i += blockDim.x) {
    const auto at = blockIdx.x * std::int64_t{256} + i;
    if (at >= columns) break;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kColumnWarps; ++w) sum += shared[w][i];
    scratch[blockIdx.y * columns + at] = sum;
  }
}

template <typename Row>
void sum_columns(Row row_values, std::int64_t rows, std::int64_t columns, float* scratch, Stream stream) {
  const dim3 grid(static_cast<unsigned>((columns + 255) / 256), static_cast<unsigned>(column_parts(rows)));
  sum_bands<<<grid, 32 * kColumnWarps, 0, of(stream)>>>(row_values, rows, columns, scratch);
  check_launch("sum_bands");
}

}  // namespace lockstep::kernels

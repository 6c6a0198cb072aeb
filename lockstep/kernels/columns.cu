// Sums over the rows of a matrix, for the gradient of a bias.
#include <stdexcept>
#include <string>

#include <lockstep/kernels/architectures.h>
#include <lockstep/kernels/columns.cuh>

namespace lockstep::kernels {

bool available() {
  static const bool found = [] {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess) return false;
    for (int device = 0; device < devices; ++device) {
      int major = 0, minor = 0;
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
      if (!runs_on(LOCKSTEP_CUDA_ARCHITECTURES, major, minor)) return false;
    }
    return devices > 0;
  }();
  return found;
}

void check_launch(const char* kernel) {
  if (const auto error = cudaGetLastError(); error != cudaSuccess)
    throw std::runtime_error(std::string("launching the CUDA kernel ") + kernel +
                             " failed: " + cudaGetErrorString(error));
}

namespace {

constexpr int kAddColumns = 32, kAddRows = 32;

// Adds up scratch[2, parts, columns] into first[columns] and second[columns]. The order depends only on
// `parts`.
template <typename T>
__global__ void __launch_bounds__(kAddColumns* kAddRows)
    add_parts(const float* scratch, int parts, std::int64_t columns, T* first, T* second) {
  __shared__ float shared[kAddRows][kAddColumns + 1];
  const auto column = blockIdx.x * std::int64_t{kAddColumns} + threadIdx.x;
  const float* from = scratch + blockIdx.y * parts * columns;
  float sum = 0;
  if (column < columns)
#pragma unroll 8
    for (int part = threadIdx.y; part < parts; part += kAddRows) sum += from[part * columns + column];
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  sum = warp_sum(shared[threadIdx.x][threadIdx.y]);  // this warp's column is now threadIdx.y
  const auto mine = blockIdx.x * std::int64_t{kAddColumns} + threadIdx.y;
  if (threadIdx.x == 0 && mine < columns) (blockIdx.y == 0 ? first : second)[mine] = from_float<T>(sum);
}

template <typename T>
struct Plain {
  const T* values;
  std::int64_t columns;
  __device__ void operator()(std::int64_t row, std::int64_t column, float (&eight)[8]) const {
    load8(values + row * columns + column, eight);
  }
};

}  // namespace

int column_parts(std::int64_t rows) {
  // Enough to fill the device, with enough rows each that adding up the parts is cheap.
  return static_cast<int>(std::min<std::int64_t>(128, (rows + 63) / 64));
}

void add_column_parts(Number number, const float* scratch, int parts, std::int64_t columns, void* first,
                      void* second, Stream stream) {
  const dim3 grid(static_cast<unsigned>((columns + kAddColumns - 1) / kAddColumns),
                  second == nullptr ? 1 : 2);
  with_type(number, [&]<typename T>(T) {
    add_parts<T><<<grid, dim3(kAddColumns, kAddRows), 0, of(stream)>>>(
        scratch, parts, columns, static_cast<T*>(first), static_cast<T*>(second));
  });
  check_launch("add_parts");
}

std::size_t column_sum_scratch(std::int64_t rows, std::int64_t columns) {
  return static_cast<std::size_t>(column_parts(rows)) * static_cast<std::size_t>(columns);
}

void column_sums(Number number, const void* values, std::int64_t rows, std::int64_t columns, void* sums,
                 float* scratch, Stream stream) {
  with_type(number, [&]<typename T>(T) {
    sum_columns(Plain<T>{static_cast<const T*>(values), columns}, rows, columns, scratch, stream);
  });
  add_column_parts(number, scratch, column_parts(rows), columns, sums, nullptr, stream);
}

}  // namespace lockstep::kernels

// Sums over rows: the gradient of a bias.
#include <stdexcept>
#include <string>

#include <lockstep/kernels/columns.cuh>

namespace lockstep::kernels {

bool available() {
  static const bool found = [] {
    int devices = 0;
    return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
  }();
  return found;
}

void check_launch(const char* kernel) {
  if (const auto error = cudaGetLastError(); error != cudaSuccess)
    throw std::runtime_error(std::string("the CUDA kernel ") + kernel +
                             " could not be launched: " + cudaGetErrorString(error));
}

namespace {

// scratch[parts, columns] to sums[columns], parts in their order.
template <typename T>
__global__ void add_parts(const float* scratch, int parts, std::int64_t columns, T* sums) {
  const auto column = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x;
  if (column >= columns) return;
  float sum = 0;
#pragma unroll 8
  for (int part = 0; part < parts; ++part) sum += scratch[part * columns + column];
  sums[column] = from_float<T>(sum);
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
  // As many as fill the device, and each of enough rows that adding up the parts is little work.
  return static_cast<int>(std::min<std::int64_t>(128, (rows + 63) / 64));
}

void add_column_parts(Number number, const float* scratch, int parts, std::int64_t columns, void* sums,
                      Stream stream) {
  constexpr int kThreads = 64;
  const auto blocks = static_cast<unsigned>((columns + kThreads - 1) / kThreads);
  with_type(number, [&]<typename T>(T) {
    add_parts<T><<<blocks, kThreads, 0, of(stream)>>>(scratch, parts, columns, static_cast<T*>(sums));
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
  add_column_parts(number, scratch, column_parts(rows), columns, sums, stream);
}

}  // namespace lockstep::kernels

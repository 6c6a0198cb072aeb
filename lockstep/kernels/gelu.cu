// GELU (tanh approximation), and its gradient together with the gradient of the preceding bias.
#include <lockstep/kernels/columns.cuh>

namespace lockstep::kernels {
namespace {

constexpr float kRoot = 0.7978845608028654f;  // sqrt(2 / pi)
constexpr float kCube = 0.044715f;

// (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)); this form is also accurate near 0.
template <typename T>
__device__ inline float half_tanh(float u) {
  if constexpr (sizeof(T) == 4) return 1 / (1 + expf(-2 * u));
  return __fdividef(1, 1 + power_of_2(-2 * 1.4426950408889634f * u));
}

template <typename T>
__global__ void gelu_all(const T* x, std::int64_t count, T* out) {
  const auto at = (blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x) * 8;
  if (at >= count) return;
  float v[8];
  load8(x + at, v);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float inner = kRoot * (v[i] + kCube * v[i] * v[i] * v[i]);
    v[i] *= half_tanh<T>(inner);
  }
  store8(out + at, v);
}

template <typename T>
struct GeluGradient {
  const T *x, *dout;
  T* dx;
  std::int64_t columns;
  __device__ void operator()(std::int64_t row, std::int64_t column, float (&eight)[8]) const {
    const auto at = row * columns + column;
    float v[8];
    load8(x + at, v);
    load8_once(dout + at, eight);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float square = v[i] * v[i];
      const float h = half_tanh<T>(kRoot * (v[i] + kCube * v[i] * square));
      const float slope = 2 * h * (1 - h) * kRoot * (1 + 3 * kCube * square);
      eight[i] *= h + v[i] * slope;
    }
    store8(dx + at, eight);
  }
};

}  // namespace

void gelu(Number number, const void* x, std::int64_t count, void* out, Stream stream) {
  constexpr int kThreads = 256;
  const auto blocks = static_cast<unsigned>((count / 8 + kThreads - 1) / kThreads);
  with_type(number, [&]<typename T>(T) {
    gelu_all<T><<<blocks, kThreads, 0, of(stream)>>>(static_cast<const T*>(x), count, static_cast<T*>(out));
  });
  check_launch("gelu_all");
}

void gelu_gradient(Number number, const void* x, const void* dout, std::int64_t rows, std::int64_t columns,
                   void* dx, void* dbias, float* scratch, Stream stream) {
  with_type(number, [&]<typename T>(T) {
    sum_columns(
        GeluGradient<T>{static_cast<const T*>(x), static_cast<const T*>(dout), static_cast<T*>(dx), columns},
        rows, columns, scratch, stream);
  });
  if (dbias != nullptr)
    add_column_parts(number, scratch, column_parts(rows), columns, dbias, nullptr, stream);
}

}  // namespace lockstep::kernels

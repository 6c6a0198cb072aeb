// Device helpers shared by the kernels: vector loads and stores, conversions, reductions over a warp or
// block.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <lockstep/kernels/kernels.h>

namespace lockstep::kernels {

inline cudaStream_t of(Stream stream) { return static_cast<cudaStream_t>(stream); }

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }
template <typename T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

// Eight adjacent numbers, aligned to 16 bytes.
template <typename T>
struct alignas(16) Eight {
  T at[8];
};

template <typename T>
__device__ inline void load8(const T* from, float (&to)[8]) {
  const auto eight = *reinterpret_cast<const Eight<T>*>(from);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = to_float(eight.at[i]);
}
// For data that is read only once: does not evict other data from the cache.
template <typename T>
__device__ inline void load8_once(const T* from, float (&to)[8]) {
  Eight<T> eight;
  constexpr int kWords = sizeof(eight) / sizeof(int4);
  auto* words = reinterpret_cast<int4*>(&eight);
#pragma unroll
  for (int w = 0; w < kWords; ++w) words[w] = __ldcs(reinterpret_cast<const int4*>(from) + w);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = to_float(eight.at[i]);
}
template <typename T>
__device__ inline void store8(T* to, const float (&from)[8]) {
  Eight<T> eight;
#pragma unroll
  for (int i = 0; i < 8; ++i) eight.at[i] = from_float<T>(from[i]);
  *reinterpret_cast<Eight<T>*>(to) = eight;
}

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
__device__ inline float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// exp2f without its handling of denormal numbers.
__device__ inline float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Calls `body` with a value of the type that `number` names.
template <typename Body>
void with_type(Number number, Body&& body) {
  switch (number) {
    case Number::float32: return body(float());
    case Number::bfloat16: return body(__nv_bfloat16());
    case Number::float16: return body(__half());
  }
}

// Throws std::runtime_error with CUDA's message if the launch of `kernel` failed.
void check_launch(const char* kernel);

}  // namespace lockstep::kernels

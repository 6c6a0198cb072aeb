// Cross-entropy of classes, and its gradient in the same pass. A block takes a row; the row stays in shared
// memory between the passes over it where it fits, so that memory is read once and written once.
#include <lockstep/kernels/device.cuh>

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr std::size_t kCacheBytes = 112 * 1024;  // two blocks on a multiprocessor of 228 KiB
constexpr float kLog2E = 1.4426950408889634f;

// exp(x - from), in the precision of T; from2 is from in powers of two.
template <typename T>
__device__ inline float exp_from(float x, float from, float from2) {
  if constexpr (sizeof(T) == 4) return power_of_2((x - from) * kLog2E);
  return power_of_2(fmaf(x, kLog2E, -from2));
}

template <typename Combine>
__device__ float block_combine(float x, float* shared, Combine&& combine) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, step));
  __syncthreads();  // the last use of shared is over
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  x = shared[threadIdx.x % 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

template <typename T, bool kCached, bool kSmooth>
__global__ void __launch_bounds__(kThreads) entropy_rows(CrossEntropy e) {
  extern __shared__ int4 cache_words[];
  __shared__ float shared[kWarps];
  const auto add = [](float a, float b) { return a + b; };
  const auto most = [](float a, float b) { return fmaxf(a, b); };
  const auto row = std::int64_t{blockIdx.x};
  const auto* logits = static_cast<const T*>(e.logits) + row * e.classes;
  auto* gradient = e.gradient == nullptr ? nullptr : static_cast<T*>(e.gradient) + row * e.classes;
  auto* cache = reinterpret_cast<T*>(cache_words);
  const int classes = static_cast<int>(e.classes);
  const auto target = e.targets[row];
  const bool ignored = target == e.ignore_index;
  const bool wrong = !ignored && (target < 0 || target >= e.classes);
  if (ignored || wrong) {
    if (threadIdx.x == 0 && e.losses != nullptr) e.losses[row] = ignored ? 0.0f : __int_as_float(0x7fc00000);
    if (gradient != nullptr) {
      const float zeros[8] = {};
      for (int at = threadIdx.x * 8; at < classes; at += kThreads * 8) store8(gradient + at, zeros);
    }
    return;
  }

  float largest = -INFINITY, sum = 0;
#pragma unroll 2
  for (int at = threadIdx.x * 8; at < classes; at += kThreads * 8) {
    float v[8];
    if constexpr (kCached) {
      load8_once(logits + at, v);
      store8(cache + at, v);  // the same bits: they came from T
    } else {
      load8(logits + at, v);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      largest = fmaxf(largest, v[i]);
      if constexpr (kSmooth) sum += v[i];
    }
  }
  largest = block_combine(largest, shared, most);
  // Each thread reads what it wrote itself: no barrier is needed for the cache.
  const auto* source = kCached ? cache : logits;
  const float base = largest * kLog2E;
  float total = 0;
#pragma unroll 2
  for (int at = threadIdx.x * 8; at < classes; at += kThreads * 8) {
    float v[8];
    load8(source + at, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) total += exp_from<T>(v[i], largest, base);
  }
  total = block_combine(total, shared, add);
  const float log_sum = largest + logf(total);
  const float smooth = kSmooth ? static_cast<float>(e.label_smoothing) : 0.0f;
  const float wanted = to_float(logits[target]);  // before the gradient may take its place
  if constexpr (kSmooth) sum = block_combine(sum, shared, add);
  if (threadIdx.x == 0 && e.losses != nullptr)
    e.losses[row] = (1 - smooth) * (log_sum - wanted) + smooth * (log_sum - sum / e.classes);
  if (gradient == nullptr) return;
  __syncthreads();  // everybody has read logits[target]

  const float scale = e.scale == nullptr ? 1.0f : *e.scale;
  const float everywhere = smooth / classes * scale;
  const float bottom = log_sum * kLog2E;
#pragma unroll 2
  for (int at = threadIdx.x * 8; at < classes; at += kThreads * 8) {
    float v[8];
    load8(source + at, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[i] = exp_from<T>(v[i], log_sum, bottom) * scale;
      if constexpr (kSmooth) v[i] -= everywhere;
    }
    store8(gradient + at, v);
  }
  // The thread that wrote the target's place mends it.
  if (threadIdx.x == target / 8 % kThreads)
    gradient[target] =
        from_float<T>(exp_from<T>(wanted, log_sum, bottom) * scale - everywhere - (1 - smooth) * scale);
}

template <typename T>
__global__ void scale_all(const float* in, std::int64_t count, const float* scale, T* out) {
  const float factor = *scale;
  for (auto at = (blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x) * 8; at < count;
       at += std::int64_t{gridDim.x} * blockDim.x * 8) {
    float v[8];
    load8_once(in + at, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] *= factor;
    store8(out + at, v);
  }
}

constexpr std::size_t kPlainShared =
    47 * 1024;  // what a kernel may have without being asked for, less its own

// What a block can have of this device.
std::size_t most_shared_bytes() {
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess)
    return kPlainShared;
  return static_cast<std::size_t>(bytes) - 1024;
}

}  // namespace

void cross_entropy(const CrossEntropy& entropy, Stream stream) {
  const auto blocks = static_cast<unsigned>(entropy.rows);
  with_type(entropy.number, [&]<typename T>(T) {
    const auto bytes = static_cast<std::size_t>(entropy.classes) * sizeof(T);
    const bool cached = bytes <= std::min(kCacheBytes, most_shared_bytes());
    const auto launch = [&](auto* kernel) {
      if (cached && bytes > kPlainShared)
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
      kernel<<<blocks, kThreads, cached ? bytes : 0, of(stream)>>>(entropy);
    };
    if (entropy.label_smoothing > 0)
      cached ? launch(entropy_rows<T, true, true>) : launch(entropy_rows<T, false, true>);
    else
      cached ? launch(entropy_rows<T, true, false>) : launch(entropy_rows<T, false, false>);
  });
  check_launch("entropy_rows");
}

void scale(const float* in, std::int64_t count, const float* factor, Number number, void* out,
           Stream stream) {
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>((count / 8 + 255) / 256, 132 * 16));
  with_type(number, [&]<typename T>(T) {
    scale_all<T><<<blocks, 256, 0, of(stream)>>>(in, count, factor, static_cast<T*>(out));
  });
  check_launch("scale_all");
}

}  // namespace lockstep::kernels

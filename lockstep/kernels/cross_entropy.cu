// Cross-entropy of classes, and its gradient in the same kernel. One block handles one row. If the row fits
// into shared memory it stays there between passes, so global memory is read once and written once.
#include <lockstep/kernels/device.cuh>

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr std::size_t kCacheBytes = 112 * 1024;  // two blocks fit on a multiprocessor with 228 KiB
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// exp(x - largest) for the elements of a row, in the precision of T. For 16-bit types it saves an operation
// by scaling the whole row by a common factor, 2 to the power of excess(). Ratios are exact for logits of any
// size.
template <typename T>
struct ExpFrom {
  // From 65,536 on, neighbouring 16-bit values are at least 256 apart. Only values equal to the largest
  // contribute then, and powers of two separate them without rounding.
  __device__ explicit ExpFrom(float largest)
      : from(largest),
        unit(sizeof(T) == 2 && fabsf(largest) >= 65536.0f ? 1.0f : kLog2E),
        base(largest * unit) {}
  __device__ float operator()(float x) const {
    if constexpr (sizeof(T) == 4) return power_of_2((x - from) * kLog2E);
    return power_of_2(fmaf(x, unit, -base));
  }
  __device__ float excess() const { return sizeof(T) == 4 ? 0.0f : fmaf(from, unit, -base); }

  float from, unit, base;
};

template <typename Combine>
__device__ float block_combine(float x, float* shared, Combine&& combine) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, step));
  __syncthreads();  // the previous use of `shared` has ended
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
  const auto* logits = static_cast<const T*>(e.logits) + row * e.columns;
  auto* gradient = e.gradient == nullptr ? nullptr : static_cast<T*>(e.gradient) + row * e.columns;
  auto* cache = reinterpret_cast<T*>(cache_words);
  const int classes = static_cast<int>(e.classes), columns = static_cast<int>(e.columns);
  const auto target = e.targets[row];
  const bool ignored = target == e.ignore_index;
  const bool wrong = !ignored && (target < 0 || target >= e.classes);
  if (ignored || wrong) {
    if (threadIdx.x == 0 && e.losses != nullptr) e.losses[row] = ignored ? 0.0f : __int_as_float(0x7fc00000);
    if (gradient != nullptr) {
      const float zeros[8] = {};
      for (int at = threadIdx.x * 8; at < columns; at += kThreads * 8) store8(gradient + at, zeros);
    }
    return;
  }

  float largest = -INFINITY;
#pragma unroll 2
  for (int at = threadIdx.x * 8; at < columns; at += kThreads * 8) {
    float v[8];
    if constexpr (kCached) {
      load8_once(logits + at, v);
      store8(cache + at, v);  // the same bits, because the values came from T
    } else {
      load8(logits + at, v);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, v[i]);
  }
  largest = block_combine(largest, shared, most);
  // Each thread reads only what it wrote itself, so the cache needs no barrier.
  const auto* source = kCached ? cache : logits;
  const ExpFrom<T> exp_from(largest);
  float total = 0, below = 0;  // below: sum of (largest - x)
#pragma unroll 2
  for (int at = threadIdx.x * 8; at < columns; at += kThreads * 8) {
    float v[8];
    load8(source + at, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      total += exp_from(v[i]);
      if constexpr (kSmooth) below += at + i < classes ? largest - v[i] : 0.0f;
    }
  }
  total = block_combine(total, shared, add);
  // Keep this apart from `largest`: added to a number far from zero, it would be lost to rounding.
  const float log_total = logf(total) - exp_from.excess() * kLn2;
  const float smooth = kSmooth ? static_cast<float>(e.label_smoothing) : 0.0f;
  const float wanted = to_float(logits[target]);  // before the gradient may overwrite it
  if constexpr (kSmooth) below = block_combine(below, shared, add);
  if (threadIdx.x == 0 && e.losses != nullptr)
    e.losses[row] =
        log_total + (1 - smooth) * (largest - wanted) + (kSmooth ? smooth * (below / classes) : 0.0f);
  if (gradient == nullptr) return;
  __syncthreads();  // all threads have read logits[target]

  const float scale = e.scale == nullptr ? 1.0f : *e.scale;
  const float everywhere = smooth / classes * scale;
  const float share = scale / total;
#pragma unroll 2
  for (int at = threadIdx.x * 8; at < columns; at += kThreads * 8) {
    float v[8];
    load8(source + at, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[i] = exp_from(v[i]) * share;
      if constexpr (kSmooth) v[i] -= everywhere;
    }
    store8(gradient + at, v);
  }
  // The thread that wrote the target's element corrects it.
  if (threadIdx.x == target / 8 % kThreads)
    gradient[target] = from_float<T>(exp_from(wanted) * share - everywhere - (1 - smooth) * scale);
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
    47 * 1024;  // shared memory available without opting in, less the kernel's own

// Maximum shared memory of a block on this device, in bytes.
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
    const auto bytes = static_cast<std::size_t>(entropy.columns) * sizeof(T);
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

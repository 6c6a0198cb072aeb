// Adam and AdamW over many tensors in one launch. The arithmetic and its rounding are those of
// optim/update/vector.h.
#include <algorithm>

#include <lockstep/kernels/device.cuh>

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kRounds = 2;  // of four neighbours each, with both loads in flight together
constexpr std::int64_t kChunk = kThreads * 4 * kRounds;
constexpr int kTensors = 48;  // per launch: kernel arguments are limited to 4 KiB

struct Launch {
  AdamTensor tensors[kTensors];
  int first_block[kTensors];
  int count;
  bool maximize;
  AdamFactors factors;
  const AdamFactors* each;  // one per tensor, on the device; null: use `factors`
};
static_assert(sizeof(Launch) <= 4096);

template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T at[4];
};

// Optimizer state is read and written once per step, so bypass the cache to keep other data in it.
template <typename T>
__device__ void load4(const T* from, float (&to)[4]) {
  Four<T> four;
  if constexpr (sizeof(T) == 4)
    *reinterpret_cast<uint4*>(&four) = __ldcs(reinterpret_cast<const uint4*>(from));
  else
    *reinterpret_cast<uint2*>(&four) = __ldcs(reinterpret_cast<const uint2*>(from));
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = to_float(four.at[i]);
}
__device__ void store4_once(float* to, const float (&from)[4]) {
  __stcs(reinterpret_cast<float4*>(to), make_float4(from[0], from[1], from[2], from[3]));
}
template <typename T>
__device__ void store4(T* to, const float (&from)[4]) {
  Four<T> four;
#pragma unroll
  for (int i = 0; i < 4; ++i) four.at[i] = from_float<T>(from[i]);
  *reinterpret_cast<Four<T>*>(to) = four;
}

template <bool kMax>
__device__ void update(const AdamFactors& f, bool maximize, float gradient, float& master, float& first,
                       float& second, float& most) {
  float g = maximize ? -gradient : gradient;
  if (f.l2 != 0) g = __fmaf_rn(master, f.l2, g);
  const float change = __fsub_rn(g, first);
  // LibTorch's lerp starts from its far end if the weight is at least a half.
  first = f.first_weight < 0.5f ? __fmaf_rn(f.first_weight, change, first)
                                : __fmaf_rn(__fsub_rn(f.first_weight, 1.0f), change, g);
  second = __fmaf_rn(__fmul_rn(f.second_weight, g), g, __fmul_rn(second, f.second_keep));
  if constexpr (kMax) most = most != most || most > second ? most : second;  // keeps a NaN from either side
  const float root = __fsqrt_rn(kMax ? most : second);
  const float divisor = __fadd_rn(__fdiv_rn(root, f.root_divisor), f.eps);
  master = __fadd_rn(__fmul_rn(master, f.shrink), __fdiv_rn(__fmul_rn(f.step_size, first), divisor));
}

__device__ bool lies_on(const void* at, std::uintptr_t bytes) {
  return reinterpret_cast<std::uintptr_t>(at) % bytes == 0;
}

// P: the parameter's type. `master` is the float version of it; if P is float, the parameter is its own
// master.
template <typename P, typename G, bool kMax>
__global__ void __launch_bounds__(kThreads) adam_step(const __grid_constant__ Launch launch) {
  const int block = static_cast<int>(blockIdx.x);
  int tensor = 0;
  for (int step = 32; step > 0; step /= 2)  // the last tensor whose blocks begin at or before this one
    if (tensor + step < launch.count && launch.first_block[tensor + step] <= block) tensor += step;
  const AdamTensor& t = launch.tensors[tensor];
  const AdamFactors f = launch.each != nullptr ? launch.each[tensor] : launch.factors;
  const auto begin = (block - launch.first_block[tensor]) * kChunk;
  const auto count = min(kChunk, t.count - begin);

  constexpr bool kRounded = sizeof(P) != sizeof(float);
  P* const parameter = kRounded ? static_cast<P*>(t.parameter) + begin : nullptr;
  const G* const gradient = static_cast<const G*>(t.gradient) + begin;
  float* const master = t.master + begin;
  float* const first = t.exp_avg + begin;
  float* const second = t.exp_avg_sq + begin;
  float* const most = kMax ? t.max_exp_avg_sq + begin : nullptr;

  const bool whole = count == kChunk && lies_on(gradient, 4 * sizeof(G)) &&
                     lies_on(parameter, 4 * sizeof(P)) && lies_on(master, 16) && lies_on(first, 16) &&
                     lies_on(second, 16) && lies_on(most, 16);
  if (!whole) {
    for (auto i = static_cast<std::int64_t>(threadIdx.x); i < count; i += kThreads) {
      float x = master[i], m = first[i], v = second[i], larger = kMax ? most[i] : 0;
      update<kMax>(f, launch.maximize, to_float(gradient[i]), x, m, v, larger);
      master[i] = x;
      first[i] = m;
      second[i] = v;
      if constexpr (kMax) most[i] = larger;
      if constexpr (kRounded) parameter[i] = from_float<P>(x);
    }
    return;
  }
  float g[kRounds][4], x[kRounds][4], m[kRounds][4], v[kRounds][4], larger[kRounds][4] = {};
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int i = (r * kThreads + static_cast<int>(threadIdx.x)) * 4;
    load4(gradient + i, g[r]);
    load4(master + i, x[r]);
    load4(first + i, m[r]);
    load4(second + i, v[r]);
    if constexpr (kMax) load4(most + i, larger[r]);
  }
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int i = (r * kThreads + static_cast<int>(threadIdx.x)) * 4;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      update<kMax>(f, launch.maximize, g[r][k], x[r][k], m[r][k], v[r][k], larger[r][k]);
    store4_once(master + i, x[r]);
    store4_once(first + i, m[r]);
    store4_once(second + i, v[r]);
    if constexpr (kMax) store4_once(most + i, larger[r]);
    if constexpr (kRounded) store4(parameter + i, x[r]);  // cached: the next forward reads it
  }
}

// adam_scalars of optim/update/update.cpp, on the device, so that a replayed graph keeps counting steps.
__global__ void begin_step(const __grid_constant__ Launch launch, const AdamSettings* settings,
                           AdamFactors* factors) {
  const int tensor = static_cast<int>(threadIdx.x);
  if (tensor >= launch.count) return;
  const AdamSettings s = *settings;
  const auto step = static_cast<double>(*launch.tensors[tensor].step += 1);
  const double correction1 = 1 - pow(s.beta1, step), correction2 = 1 - pow(s.beta2, step);
  const double decay = s.weight_decay;
  factors[tensor] = {.first_weight = static_cast<float>(1 - s.beta1),
                     .second_keep = static_cast<float>(s.beta2),
                     .second_weight = static_cast<float>(1 - s.beta2),
                     .step_size = static_cast<float>(-(s.lr / correction1)),
                     .root_divisor = static_cast<float>(pow(correction2, 0.5)),
                     .eps = static_cast<float>(s.eps),
                     .shrink = s.decoupled && decay != 0 ? static_cast<float>(1 - __dmul_rn(s.lr, decay)) : 1,
                     .l2 = s.decoupled ? 0 : static_cast<float>(decay)};
}

__global__ void put_settings(AdamSettings settings, AdamSettings* on_device) { *on_device = settings; }

template <typename P, typename G>
void launch_step(const Launch& launch, int blocks, bool amsgrad, Stream stream) {
  if (amsgrad)
    adam_step<P, G, true><<<static_cast<unsigned>(blocks), kThreads, 0, of(stream)>>>(launch);
  else
    adam_step<P, G, false><<<static_cast<unsigned>(blocks), kThreads, 0, of(stream)>>>(launch);
  check_launch("adam_step");
}

}  // namespace

void adam(const AdamCall& call, std::span<const AdamTensor> tensors, Stream stream) {
  Launch launch{};
  launch.maximize = call.maximize;
  launch.factors = call.factors;
  int blocks = 0;
  std::size_t done = 0;
  const auto flush = [&] {
    if (launch.count == 0) return;
    if (call.settings != nullptr) {
      auto* const factors = call.scratch + done;
      begin_step<<<1, kTensors, 0, of(stream)>>>(launch, call.settings, factors);
      check_launch("begin_step");
      launch.each = factors;
    }
    with_type(call.parameter, [&]<typename P>(P) {
      if (call.gradient == Number::float32 || sizeof(P) == sizeof(float))
        launch_step<P, float>(launch, blocks, call.amsgrad, stream);
      else
        launch_step<P, P>(launch, blocks, call.amsgrad, stream);
    });
    done += static_cast<std::size_t>(launch.count);
    launch.count = blocks = 0;
  };
  for (const auto& tensor : tensors) {
    const auto needed = (tensor.count + kChunk - 1) / kChunk;
    if (launch.count == kTensors || blocks + needed > (std::int64_t{1} << 30)) flush();
    launch.tensors[launch.count] = tensor;
    launch.first_block[launch.count++] = blocks;
    blocks += static_cast<int>(needed);
  }
  flush();
}

void put_adam_settings(const AdamSettings& settings, AdamSettings* on_device, Stream stream) {
  put_settings<<<1, 1, 0, of(stream)>>>(settings, on_device);
  check_launch("put_settings");
}

}  // namespace lockstep::kernels

#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include <lockstep/comm/transports/cuda_ipc/engine/fold.h>
#include <lockstep/kernels/device.cuh>

namespace lockstep::kernels {
namespace {

using detail::Fold;
using detail::FoldJob;

constexpr int kThreads = 256;
constexpr int kDepth = 7;  // of the tree over kMostFolded inputs, plus one for the carry
static_assert((1 << (kDepth - 1)) == kMostFolded);

// --- Numbers: how they are stored, and what is folded. -----------------------------------------------------

template <typename T>
struct Plain {
  using Stored = T;
  using Wide = T;
  __device__ static Wide widen(Stored x) { return x; }
  __device__ static Stored narrow(Wide x) { return x; }
};

struct Bfloat16 {
  using Stored = std::uint16_t;
  using Wide = float;
  __device__ static float widen(Stored x) { return __uint_as_float(static_cast<unsigned>(x) << 16); }
  // Every NaN becomes 7fc0.
  __device__ static Stored narrow(float x) {
    const unsigned word = __float_as_uint(x);
    return static_cast<Stored>(x != x ? 0x7fc0u : (word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
  }
};

struct Half {
  using Stored = std::uint16_t;
  using Wide = float;
  // Every NaN keeps its sign and nothing else.
  __device__ static float widen(Stored x) {
    if ((x & 0x7fffu) > 0x7c00u)
      return __uint_as_float((static_cast<unsigned>(x & 0x8000u) << 16) | 0x7fc00000u);
    return __half2float(__ushort_as_half(x));
  }
  __device__ static Stored narrow(float x) {
    if (x != x) return static_cast<Stored>(((__float_as_uint(x) & 0x80000000u) >> 16) | 0x7e00u);
    return __half_as_ushort(__float2half_rn(x));
  }
};

// --- Folds. ------------------------------------------------------------------------------------------------

// The NaN that a CPU returns: that of an operand, quieted; if no operand is NaN, the negative one without
// payload. A device always returns the same NaN.
__device__ inline float nan_of(float a, float b) {
  return __uint_as_float(a != a   ? __float_as_uint(a) | 0x00400000u
                         : b != b ? __float_as_uint(b) | 0x00400000u
                                  : 0xffc00000u);
}
__device__ inline double nan_of(double a, double b) {
  constexpr long long kQuiet = 0x0008000000000000ll, kNone = static_cast<long long>(0xfff8000000000000ull);
  return __longlong_as_double(a != a   ? __double_as_longlong(a) | kQuiet
                              : b != b ? __double_as_longlong(b) | kQuiet
                                       : kNone);
}

struct Sum {
  template <typename T>
  __device__ static T of(T a, T b) {
    const T sum = static_cast<T>(a + b);
    if constexpr (std::is_floating_point_v<T>) return sum == sum ? sum : nan_of(a, b);
    return sum;
  }
};
struct Product {
  template <typename T>
  __device__ static T of(T a, T b) {
    const T product = static_cast<T>(a * b);
    if constexpr (std::is_floating_point_v<T>) return product == product ? product : nan_of(a, b);
    return product;
  }
};
// A NaN on either side wins; of equal values, the left one.
struct Min {
  template <typename T>
  __device__ static T of(T a, T b) {
    return a <= b || a != a ? a : b;
  }
};
struct Max {
  template <typename T>
  __device__ static T of(T a, T b) {
    return a >= b || a != a ? a : b;
  }
};
struct And {
  template <typename T>
  __device__ static T of(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct Or {
  template <typename T>
  __device__ static T of(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct Xor {
  template <typename T>
  __device__ static T of(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

__device__ inline float divided(float x, double divisor) {
  return x == x ? __fdiv_rn(x, static_cast<float>(divisor)) : nan_of(x, x);
}
__device__ inline double divided(double x, double divisor) {
  return x == x ? __ddiv_rn(x, divisor) : nan_of(x, x);
}

// --- The kernel. -------------------------------------------------------------------------------------------

struct Buffers {
  const void* inputs[kMostFolded];
  void* outputs[kMostFolded];
  int input_count, output_count;
};

template <typename T, int kPack>
struct alignas(sizeof(T) * kPack) Pack {
  T at[kPack];
};

// The left subtree of p > 1 inputs has the largest power of two below p.
__host__ __device__ constexpr int left_of(int p) {
  int left = 1;
  while (2 * left < p) left *= 2;
  return left;
}

template <typename Format, typename Op, int kInputs, typename Stored>
__device__ inline typename Format::Wide tree(const Stored* values, int k) {
  if constexpr (kInputs == 1) {
    return Format::widen(values[0].at[k]);
  } else {
    constexpr int kLeft = left_of(kInputs);
    return Op::of(tree<Format, Op, kLeft>(values, k), tree<Format, Op, kInputs - kLeft>(values + kLeft, k));
  }
}

// For kAny inputs: subtrees wait for their right neighbour, like the digits of a binary counter. The digits
// are spelled out, so all stay in registers. Integer folds give the same result in any order. load(i) loads
// input i.
constexpr int kAny = 0;
template <typename Format, typename Op, int kPack, typename Load>
__device__ inline void fold_any(int inputs, typename Format::Wide (&value)[kPack], Load load) {
  using Wide = typename Format::Wide;
  auto next = load(0);
  auto take = [&](int i, Wide(&into)[kPack]) {
    const auto here = next;
    if (i + 1 < inputs) next = load(i + 1);
#pragma unroll
    for (int k = 0; k < kPack; ++k) into[k] = Format::widen(here.at[k]);
  };
  if constexpr (!std::is_floating_point_v<Wide>) {
    take(0, value);
    for (int i = 1; i < inputs; ++i) {
      Wide other[kPack];
      take(i, other);
#pragma unroll
      for (int k = 0; k < kPack; ++k) value[k] = Op::of(value[k], other[k]);
    }
  } else {
    Wide waiting[kDepth][kPack];
    for (int i = 0; i < inputs; ++i) {
      take(i, value);
      bool carries = true;
#pragma unroll
      for (int digit = 0; digit < kDepth; ++digit) {
        if (!carries) continue;
        carries = (i >> digit) & 1;
#pragma unroll
        for (int k = 0; k < kPack; ++k) {
          if (carries)
            value[k] = Op::of(waiting[digit][k], value[k]);
          else
            waiting[digit][k] = value[k];
        }
      }
    }
    bool any = false;
#pragma unroll
    for (int digit = 0; digit < kDepth; ++digit) {
      if (((inputs >> digit) & 1) == 0) continue;
#pragma unroll
      for (int k = 0; k < kPack; ++k)
        value[k] = any ? Op::of(waiting[digit][k], value[k]) : waiting[digit][k];
      any = true;
    }
  }
}

// An output may be an input: a thread reads everything that it needs before it writes.
template <typename Format, typename Op, int kPack, int kInputs>
__device__ inline void fold_pack(const Buffers& buffers, std::size_t place, double divisor) {
  using Stored = Pack<typename Format::Stored, kPack>;
  using Wide = typename Format::Wide;
  auto load = [&](int i) { return reinterpret_cast<const Stored*>(buffers.inputs[i])[place]; };
  Wide value[kPack];
  if constexpr (kInputs == kAny) {
    fold_any<Format, Op, kPack>(buffers.input_count, value, load);
  } else {
    Stored values[kInputs];
#pragma unroll
    for (int i = 0; i < kInputs; ++i) values[i] = load(i);
#pragma unroll
    for (int k = 0; k < kPack; ++k) value[k] = tree<Format, Op, kInputs>(values, k);
  }
  Stored result;
#pragma unroll
  for (int k = 0; k < kPack; ++k) {
    if constexpr (std::is_floating_point_v<Wide>)
      if (divisor != 0) value[k] = divided(value[k], divisor);
    result.at[k] = Format::narrow(value[k]);
  }
  for (int o = 0; o < buffers.output_count; ++o)
    reinterpret_cast<Stored*>(buffers.outputs[o])[place] = result;
}

template <typename Format, typename Op, int kPack, int kInputs>
__global__ void __launch_bounds__(kThreads)
    fold_all(const __grid_constant__ Buffers buffers, std::size_t count, double divisor) {
  const std::size_t packs = count / kPack, step = std::size_t{gridDim.x} * kThreads;
  const std::size_t first = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  for (std::size_t place = first; place < packs; place += step)
    fold_pack<Format, Op, kPack, kInputs>(buffers, place, divisor);
  if constexpr (kPack > 1)
    for (std::size_t place = packs * kPack + first; place < count; place += step)
      fold_pack<Format, Op, 1, kInputs>(buffers, place, divisor);
}

template <typename Format, typename Op, int kPack, int kInputs>
void launch(const Buffers& buffers, std::size_t count, double divisor, Stream stream) {
  const std::size_t wanted = (count / kPack + kThreads) / kThreads;  // including the rest of a pack
  constexpr std::size_t kMost = 132 * 16;  // more blocks than any device runs at once
  const auto blocks = static_cast<unsigned>(wanted < kMost ? wanted : kMost);
  fold_all<Format, Op, kPack, kInputs><<<blocks, kThreads, 0, of(stream)>>>(buffers, count, divisor);
  check_launch("fold_all");
}

// Training mostly needs sums of floats: the common numbers of ranks are compile-time constants.
template <typename Format, typename Op, int kPack>
void launch_for(const Buffers& buffers, std::size_t count, double divisor, Stream stream) {
  if constexpr (std::is_same_v<Op, Sum> && std::is_same_v<typename Format::Wide, float> && kPack > 1) {
    if (buffers.input_count == 2) return launch<Format, Op, kPack, 2>(buffers, count, divisor, stream);
    if (buffers.input_count == 4) return launch<Format, Op, kPack, 4>(buffers, count, divisor, stream);
  }
  launch<Format, Op, kPack, kAny>(buffers, count, divisor, stream);
}

template <typename Format, typename Op>
bool run(const FoldJob& job, Stream stream) {
  using Stored = typename Format::Stored;
  Buffers buffers{};
  buffers.input_count = static_cast<int>(job.input_count);
  buffers.output_count = static_cast<int>(job.output_count);
  std::uintptr_t places = 0;
  for (std::size_t i = 0; i < job.input_count; ++i)
    places |= reinterpret_cast<std::uintptr_t>(buffers.inputs[i] = job.inputs[i]);
  for (std::size_t o = 0; o < job.output_count; ++o)
    places |= reinterpret_cast<std::uintptr_t>(buffers.outputs[o] = job.outputs[o]);
  const std::size_t count = job.bytes / sizeof(Stored);
  const auto divisor = static_cast<double>(job.divisor);
  if (places % 16 == 0)
    launch_for<Format, Op, 16 / sizeof(Stored)>(buffers, count, divisor, stream);
  else
    launch_for<Format, Op, 1>(buffers, count, divisor, stream);
  return true;
}

template <typename Format>
bool fold_floats(Fold fold, const FoldJob& job, Stream stream) {
  switch (fold) {
    case Fold::sum: return run<Format, Sum>(job, stream);
    case Fold::product: return run<Format, Product>(job, stream);
    case Fold::min: return run<Format, Min>(job, stream);
    case Fold::max: return run<Format, Max>(job, stream);
    default: return false;
  }
}

// Unsigned, so that sums and products wrap around.
template <typename T>
bool fold_integers(Fold fold, const FoldJob& job, Stream stream) {
  using Unsigned = Plain<std::make_unsigned_t<T>>;
  switch (fold) {
    case Fold::sum: return run<Unsigned, Sum>(job, stream);
    case Fold::product: return run<Unsigned, Product>(job, stream);
    case Fold::min: return run<Plain<T>, Min>(job, stream);
    case Fold::max: return run<Plain<T>, Max>(job, stream);
    case Fold::bit_and: return run<Unsigned, And>(job, stream);
    case Fold::bit_or: return run<Unsigned, Or>(job, stream);
    case Fold::bit_xor: return run<Unsigned, Xor>(job, stream);
  }
  return false;
}

}  // namespace

bool fold(detail::Number number, detail::Fold fold, const FoldJob& job, Stream stream) {
  if (job.input_count == 0 || job.input_count > kMostFolded || job.output_count > kMostFolded)
    throw std::logic_error("too many tensors for one launch of a fold");
  if (job.bytes == 0 || job.output_count == 0) return true;
  switch (number) {
    case detail::Number::f32: return fold_floats<Plain<float>>(fold, job, stream);
    case detail::Number::f64: return fold_floats<Plain<double>>(fold, job, stream);
    case detail::Number::bf16: return fold_floats<Bfloat16>(fold, job, stream);
    case detail::Number::f16: return fold_floats<Half>(fold, job, stream);
    case detail::Number::i8: return fold_integers<std::int8_t>(fold, job, stream);
    case detail::Number::i16: return fold_integers<std::int16_t>(fold, job, stream);
    case detail::Number::i32: return fold_integers<std::int32_t>(fold, job, stream);
    case detail::Number::i64: return fold_integers<std::int64_t>(fold, job, stream);
    case detail::Number::u8: return fold_integers<std::uint8_t>(fold, job, stream);
  }
  return false;
}

}  // namespace lockstep::kernels

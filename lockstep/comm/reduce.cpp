#include <lockstep/comm/reduce.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#include <lockstep/base/error.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

namespace lockstep::detail {
namespace {

// A block of every input fits the first-level cache at 8 ranks.
constexpr std::size_t kBlock = 512;
constexpr std::size_t kFewRanks = 16;

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, c10::BFloat16> || std::is_same_v<T, c10::Half>, float, T>;

// As at::maximum and at::minimum: a NaN on either side wins.
template <typename T>
T max_of(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    if (std::isnan(a)) return a;
  return a > b || a == b ? a : b;
}
template <typename T>
T min_of(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    if (std::isnan(a)) return a;
  return a < b || a == b ? a : b;
}

// Signed integers wrap around, as LibTorch's do.
template <typename T, typename F>
T wrapping(T a, T b, F f) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::conditional_t<(sizeof(T) < sizeof(int)), unsigned, std::make_unsigned_t<T>>;
    return static_cast<T>(f(static_cast<U>(a), static_cast<U>(b)));
  } else {
    return f(a, b);
  }
}

template <typename T, typename Combine>
void tree(std::span<const void* const> inputs, void* output, std::size_t count, Combine combine,
          double divisor) {
  using W = Wide<T>;
  const std::size_t p = inputs.size();
  std::vector<W> storage;
  std::array<W, kFewRanks * kBlock> near;
  W* lanes = near.data();
  if (p > kFewRanks) {
    storage.resize(p * kBlock);
    lanes = storage.data();
  }
  for (std::size_t start = 0; start < count; start += kBlock) {
    const std::size_t n = std::min(kBlock, count - start);
    for (std::size_t r = 0; r < p; ++r) {
      const T* in = static_cast<const T*>(inputs[r]) + start;
      W* lane = lanes + r * kBlock;
      for (std::size_t i = 0; i < n; ++i) lane[i] = static_cast<W>(in[i]);
    }
    for (std::size_t stride = 1; stride < p; stride *= 2)
      for (std::size_t r = 0; r + stride < p; r += 2 * stride) {
        W* left = lanes + r * kBlock;
        const W* right = left + stride * kBlock;
        for (std::size_t i = 0; i < n; ++i) left[i] = combine(left[i], right[i]);
      }
    T* out = static_cast<T*>(output) + start;
    if (divisor != 1)
      for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<T>(lanes[i] / static_cast<W>(divisor));
    else
      for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<T>(lanes[i]);
  }
}

template <typename T>
void reduce_as(ReduceOp op, std::span<const void* const> inputs, void* output, std::size_t count) {
  using W = Wide<T>;
  auto run = [&](auto combine, double divisor = 1) { tree<T>(inputs, output, count, combine, divisor); };
  auto add = [](W a, W b) { return wrapping(a, b, std::plus<>{}); };
  switch (op) {
    case ReduceOp::SUM: return run(add);
    case ReduceOp::AVG: return run(add, static_cast<double>(inputs.size()));
    case ReduceOp::PRODUCT: return run([](W a, W b) { return wrapping(a, b, std::multiplies<>{}); });
    case ReduceOp::MIN: return run(min_of<W>);
    case ReduceOp::MAX: return run(max_of<W>);
    default: break;
  }
  if constexpr (std::is_integral_v<T>) {
    switch (op) {
      case ReduceOp::BAND: return run([](W a, W b) { return static_cast<W>(a & b); });
      case ReduceOp::BOR: return run([](W a, W b) { return static_cast<W>(a | b); });
      case ReduceOp::BXOR: return run([](W a, W b) { return static_cast<W>(a ^ b); });
      default: break;
    }
  }
  LOCKSTEP_ASSERT(false, "a reduction that its dtype does not have");
}

template <typename T>
void reduce_complex(ReduceOp op, std::span<const void* const> inputs, void* output, std::size_t count) {
  // Sums of complex numbers are sums of their parts; products are not, and are not offered.
  reduce_as<T>(op, inputs, output, 2 * count);
}

ReduceOp as_boolean(ReduceOp op) {
  switch (op) {
    case ReduceOp::SUM: return ReduceOp::BOR;
    case ReduceOp::PRODUCT: return ReduceOp::BAND;
    default: return op;
  }
}

bool bitwise(ReduceOp op) { return op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR; }

}  // namespace

bool reducible(Dtype dtype, ReduceOp op) {
  switch (dtype) {
    case Dtype::float32:
    case Dtype::float64:
    case Dtype::bfloat16:
    case Dtype::float16: return !bitwise(op);
    case Dtype::int8:
    case Dtype::int16:
    case Dtype::int32:
    case Dtype::int64:
    case Dtype::uint8:
    case Dtype::boolean: return op != ReduceOp::AVG;
    case Dtype::complex64:
    case Dtype::complex128: return op == ReduceOp::SUM || op == ReduceOp::AVG;
    default: return false;
  }
}

std::size_t item_size(Dtype dtype) {
  switch (dtype) {
    case Dtype::int8:
    case Dtype::uint8:
    case Dtype::float8_e5m2:
    case Dtype::float8_e4m3fn:
    case Dtype::boolean: return 1;
    case Dtype::bfloat16:
    case Dtype::float16:
    case Dtype::uint16:
    case Dtype::int16: return 2;
    case Dtype::float32:
    case Dtype::uint32:
    case Dtype::int32: return 4;
    case Dtype::float64:
    case Dtype::int64:
    case Dtype::uint64:
    case Dtype::complex64: return 8;
    case Dtype::complex128: return 16;
    case Dtype::other: break;
  }
  LOCKSTEP_ASSERT(false, "the size of an unknown dtype");
  return 0;
}

void reduce_tree(Dtype dtype, ReduceOp op, std::span<const void* const> inputs, void* output,
                 std::size_t count) {
  LOCKSTEP_ASSERT(!inputs.empty() && reducible(dtype, op), "a reduction that does not exist");
  switch (dtype) {
    case Dtype::float32: return reduce_as<float>(op, inputs, output, count);
    case Dtype::float64: return reduce_as<double>(op, inputs, output, count);
    case Dtype::bfloat16: return reduce_as<c10::BFloat16>(op, inputs, output, count);
    case Dtype::float16: return reduce_as<c10::Half>(op, inputs, output, count);
    case Dtype::int8: return reduce_as<std::int8_t>(op, inputs, output, count);
    case Dtype::int16: return reduce_as<std::int16_t>(op, inputs, output, count);
    case Dtype::int32: return reduce_as<std::int32_t>(op, inputs, output, count);
    case Dtype::int64: return reduce_as<std::int64_t>(op, inputs, output, count);
    case Dtype::uint8: return reduce_as<std::uint8_t>(op, inputs, output, count);
    case Dtype::boolean: return reduce_as<std::uint8_t>(as_boolean(op), inputs, output, count);
    case Dtype::complex64: return reduce_complex<float>(op, inputs, output, count);
    case Dtype::complex128: return reduce_complex<double>(op, inputs, output, count);
    default: break;
  }
}

void reduce_tree_to_all(Dtype dtype, ReduceOp op, std::span<const void* const> inputs,
                        std::span<void* const> outputs, std::size_t count) {
  const auto bytes = count * item_size(dtype);
  reduce_tree(dtype, op, inputs, outputs[0], count);
  for (std::size_t i = 1; i < outputs.size(); ++i) std::memcpy(outputs[i], outputs[0], bytes);
}

}  // namespace lockstep::detail

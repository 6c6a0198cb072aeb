#include <lockstep/comm/reduce/reduce.h>

#include <cstring>
#include <optional>

#include <lockstep/base/error.h>
#include <lockstep/comm/reduce/kernels.h>
#include <lockstep/comm/reduce/level.h>

namespace lockstep::detail {
namespace {

bool bitwise(ReduceOp op) { return op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR; }

std::optional<Number> number_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::float32:
    case Dtype::complex64: return Number::f32;  // complex numbers are summed component by component
    case Dtype::float64:
    case Dtype::complex128: return Number::f64;
    case Dtype::bfloat16: return Number::bf16;
    case Dtype::float16: return Number::f16;
    case Dtype::int8: return Number::i8;
    case Dtype::int16: return Number::i16;
    case Dtype::int32: return Number::i32;
    case Dtype::int64: return Number::i64;
    case Dtype::uint8:
    case Dtype::boolean: return Number::u8;
    default: return std::nullopt;
  }
}

Fold fold_of(Dtype dtype, ReduceOp op) {
  const bool boolean = dtype == Dtype::boolean;
  switch (op) {
    case ReduceOp::SUM:
    case ReduceOp::AVG: return boolean ? Fold::bit_or : Fold::sum;
    case ReduceOp::PRODUCT: return boolean ? Fold::bit_and : Fold::product;
    case ReduceOp::MIN: return Fold::min;
    case ReduceOp::MAX: return Fold::max;
    case ReduceOp::BAND: return Fold::bit_and;
    case ReduceOp::BOR: return Fold::bit_or;
    case ReduceOp::BXOR: break;
  }
  return Fold::bit_xor;
}

bool fold_at(SimdLevel level, Number number, Fold fold, const FoldJob& job) {
#if defined(__x86_64__)
  if (level == SimdLevel::avx512) return fold_avx512(number, fold, job);
  if (level == SimdLevel::avx2) return fold_avx2(number, fold, job);
#endif
  LOCKSTEP_ASSERT(level == SimdLevel::portable, "this build does not support the level");
  return fold_portable(number, fold, job);
}

bool convert_at(SimdLevel level, Number number, const ConvertJob& job) {
#if defined(__x86_64__)
  if (level == SimdLevel::avx512) return convert_avx512(number, job);
  if (level == SimdLevel::avx2) return convert_avx2(number, job);
#endif
  LOCKSTEP_ASSERT(level == SimdLevel::portable, "this build does not support the level");
  return convert_portable(number, job);
}

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

bool averages_truncated(Dtype dtype) {
  switch (dtype) {
    case Dtype::int8:
    case Dtype::int16:
    case Dtype::int32:
    case Dtype::int64:
    case Dtype::uint8: return true;
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
  LOCKSTEP_ASSERT(false, "item_size: unknown dtype");
  return 0;
}

namespace {

template <typename Folding>
void reduce(Folding&& folds, Dtype dtype, ReduceOp op, std::span<const void* const> inputs,
            std::span<void* const> outputs, std::size_t count, std::size_t ranks) {
  const auto number = number_of(dtype);
  LOCKSTEP_ASSERT(!inputs.empty() && number && reducible(dtype, op), "no such reduction");
  // With one rank the average is the input unchanged, even where a division would change a NaN.
  const bool divides = op == ReduceOp::AVG && inputs.size() > 1;
  const FoldJob job{
      inputs.data(),      inputs.size(), outputs.data(), outputs.size(), count * item_size(dtype),
      divides ? ranks : 0};
  const bool done = folds(*number, fold_of(dtype, op), job);
  LOCKSTEP_ASSERT(done, "the dtype does not support this reduction");
}

bool fold_here(Number number, Fold fold, const FoldJob& job) {
  return fold_at(simd_level(), number, fold, job);
}

// memcpy, because part of a tensor's memory need not be aligned.
template <typename T>
void divide_integers(void* data, std::size_t count, std::int64_t divisor) {
  auto* bytes = static_cast<char*>(data);
  for (std::size_t i = 0; i < count; ++i, bytes += sizeof(T)) {
    T value;
    std::memcpy(&value, bytes, sizeof value);
    value = static_cast<T>(value / divisor);
    std::memcpy(bytes, &value, sizeof value);
  }
}

void divide_truncated(Dtype dtype, void* data, std::size_t count, std::size_t divisor) {
  const auto by = static_cast<std::int64_t>(divisor);
  switch (dtype) {
    case Dtype::int8: return divide_integers<std::int8_t>(data, count, by);
    case Dtype::int16: return divide_integers<std::int16_t>(data, count, by);
    case Dtype::int32: return divide_integers<std::int32_t>(data, count, by);
    case Dtype::int64: return divide_integers<std::int64_t>(data, count, by);
    case Dtype::uint8: return divide_integers<std::uint8_t>(data, count, by);
    default: LOCKSTEP_ASSERT(false, "the dtype does not support averages");
  }
}

// For memory that this processor can address.
void reduce_here(Dtype dtype, ReduceOp op, std::span<const void* const> inputs,
                 std::span<void* const> outputs, std::size_t count, std::size_t ranks) {
  const bool truncates = op == ReduceOp::AVG && averages_truncated(dtype);
  reduce(fold_here, dtype, truncates ? ReduceOp::SUM : op, inputs, outputs, count, ranks);
  if (truncates)
    for (void* output : outputs) divide_truncated(dtype, output, count, ranks);
}

void convert(Dtype dtype, const ConvertJob& job) {
  const auto number = number_of(dtype);
  const bool done = number && convert_at(simd_level(), *number, job);
  LOCKSTEP_ASSERT(done, "the dtype is its own accumulator");
}

}  // namespace

void reduce_tree(Dtype dtype, ReduceOp op, std::span<const void* const> inputs, void* output,
                 std::size_t count, std::size_t ranks) {
  reduce_here(dtype, op, inputs, {&output, 1}, count, ranks == 0 ? inputs.size() : ranks);
}

void reduce_tree_to_all(Dtype dtype, ReduceOp op, std::span<const void* const> inputs,
                        std::span<void* const> outputs, std::size_t count) {
  reduce_here(dtype, op, inputs, outputs, count, inputs.size());
}

void reduce_tree_to_all(const Folds& folds, Dtype dtype, ReduceOp op, std::span<const void* const> inputs,
                        std::span<void* const> outputs, std::size_t count) {
  reduce(folds, dtype, op, inputs, outputs, count, inputs.size());
}

Dtype accumulator(Dtype dtype) {
  return dtype == Dtype::bfloat16 || dtype == Dtype::float16 ? Dtype::float32 : dtype;
}

void widen(Dtype dtype, const void* input, void* output, std::size_t count) {
  convert(dtype, {input, output, count, true});
}

void narrow(Dtype dtype, const void* input, void* output, std::size_t count) {
  convert(dtype, {input, output, count, false});
}

}  // namespace lockstep::detail

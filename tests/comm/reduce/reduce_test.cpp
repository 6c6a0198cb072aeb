#include <lockstep/comm/reduce/reduce.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/reduce/level.h>

#include "support/environment.h"
#include "support/errors.h"

namespace lockstep::testing {
namespace {

using detail::reduce_tree;
using detail::SimdLevel;

template <typename T>
std::vector<T> reduced(Dtype dtype, ReduceOp op, const std::vector<std::vector<T>>& inputs) {
  std::vector<const void*> pointers;
  for (const auto& input : inputs) pointers.push_back(input.data());
  std::vector<T> output(inputs[0].size());
  reduce_tree(dtype, op, pointers, output.data(), output.size());
  return output;
}

// The tree by its definition, one element at a time.
float tree(std::vector<float> values) {
  for (std::size_t stride = 1; stride < values.size(); stride *= 2)
    for (std::size_t r = 0; r + stride < values.size(); r += 2 * stride) values[r] += values[r + stride];
  return values[0];
}

TEST(Reduce, sums_follow_the_aligned_binary_tree_bit_for_bit) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (std::size_t ranks : {1, 2, 3, 4, 5, 7, 8, 16, 17, 33})
    for (std::size_t count : {1, 511, 512, 513, 3000}) {
      std::vector<std::vector<float>> inputs(ranks, std::vector<float>(count));
      for (auto& input : inputs)
        for (auto& x : input) x = normal(random) * std::ldexp(1.f, static_cast<int>(random() % 20));
      const auto output = reduced(Dtype::float32, ReduceOp::SUM, inputs);
      for (std::size_t i = 0; i < count; ++i) {
        std::vector<float> column;
        for (auto& input : inputs) column.push_back(input[i]);
        ASSERT_EQ(output[i], tree(column)) << ranks << " ranks, element " << i;
      }
    }
}

TEST(Reduce, p_ranks_equal_one_rank_that_adds_by_halves) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> inputs(8, std::vector<float>(100));
  for (auto& input : inputs)
    for (auto& x : input) x = normal(random);
  const std::vector<std::vector<float>> left(inputs.begin(), inputs.begin() + 4),
      right(inputs.begin() + 4, inputs.end());
  EXPECT_EQ(reduced(Dtype::float32, ReduceOp::SUM, inputs),
            reduced<float>(Dtype::float32, ReduceOp::SUM,
                           {reduced(Dtype::float32, ReduceOp::SUM, left),
                            reduced(Dtype::float32, ReduceOp::SUM, right)}));
}

TEST(Reduce, short_floats_are_summed_wide_and_rounded_once) {
  // 256 + 1 + 1 is 258 in bfloat16; rounded after every step it would stay 256.
  using B = c10::BFloat16;
  const auto sum = reduced<B>(Dtype::bfloat16, ReduceOp::SUM, {{B(256.f)}, {B(1.f)}, {B(1.f)}});
  EXPECT_EQ(static_cast<float>(sum[0]), 258.f);
  // The sum overflows half, but its average does not.
  using H = c10::Half;
  const auto average = reduced<H>(Dtype::float16, ReduceOp::AVG, {{H(60000.f)}, {H(60000.f)}});
  EXPECT_EQ(static_cast<float>(average[0]), 60000.f);
}

TEST(Reduce, the_output_may_be_an_input) {
  std::vector<float> a(1000, 1), b(1000, 2), c(1000, 4);
  const void* inputs[] = {a.data(), b.data(), c.data()};
  reduce_tree(Dtype::float32, ReduceOp::SUM, inputs, b.data(), b.size());
  EXPECT_EQ(b, std::vector<float>(1000, 7));
  EXPECT_EQ(a, std::vector<float>(1000, 1));
}

TEST(Reduce, integers_wrap_around) {
  EXPECT_EQ(reduced<std::int32_t>(Dtype::int32, ReduceOp::SUM, {{INT32_MAX}, {1}})[0], INT32_MIN);
  EXPECT_EQ(reduced<std::uint8_t>(Dtype::uint8, ReduceOp::SUM, {{200}, {100}})[0], 44);
  EXPECT_EQ(reduced<std::int16_t>(Dtype::int16, ReduceOp::PRODUCT, {{INT16_MAX}, {INT16_MAX}})[0], 1);
  EXPECT_EQ(reduced<std::int64_t>(Dtype::int64, ReduceOp::PRODUCT, {{INT64_MAX}, {2}})[0], -2);
}

TEST(Reduce, every_reduction_of_integers) {
  const std::vector<std::vector<std::int32_t>> inputs = {{6}, {5}, {12}};
  const std::pair<ReduceOp, int> expected[] = {
      {ReduceOp::SUM, 23}, {ReduceOp::PRODUCT, 360}, {ReduceOp::MIN, 5},  {ReduceOp::MAX, 12},
      {ReduceOp::BAND, 4}, {ReduceOp::BOR, 15},      {ReduceOp::BXOR, 15}};
  for (auto [op, value] : expected) EXPECT_EQ(reduced(Dtype::int32, op, inputs)[0], value) << name(op);
}

TEST(Reduce, averages_of_integers_are_truncated_toward_zero) {
  using I = std::int32_t;
  const auto average = [](const std::vector<std::vector<I>>& inputs) {
    return reduced<I>(Dtype::int32, ReduceOp::AVG, inputs);
  };
  EXPECT_EQ(average({{7, -7, 1, INT32_MAX}, {0, 0, -2, 1}}), (std::vector<I>{3, -3, 0, INT32_MIN / 2}));
  EXPECT_EQ(average({{-5}, {-5}, {-1}}), (std::vector<I>{-3}));
  EXPECT_EQ(average({{-5}}), (std::vector<I>{-5}));
  // Sums wrap around in their own type, as in NCCL.
  EXPECT_EQ(reduced<std::uint8_t>(Dtype::uint8, ReduceOp::AVG, {{200, 9}, {100, 4}}),
            (std::vector<std::uint8_t>{22, 6}));
  EXPECT_EQ(reduced<std::int8_t>(Dtype::int8, ReduceOp::AVG, {{-128}, {-1}})[0], 63);
  EXPECT_EQ(reduced<std::int64_t>(Dtype::int64, ReduceOp::AVG, {{1LL << 62}, {5}})[0], (1LL << 61) + 2);

  // Into every input at once, and over subtrees that are already sums.
  std::vector<std::int16_t> a(1000, 10), b(1000, -21);
  const void* inputs[] = {a.data(), b.data()};
  void* outputs[] = {a.data(), b.data()};
  detail::reduce_tree_to_all(Dtype::int16, ReduceOp::AVG, inputs, outputs, a.size());
  EXPECT_EQ(a, std::vector<std::int16_t>(1000, -5));
  EXPECT_EQ(b, a);
  const void* sums[] = {a.data(), a.data()};
  reduce_tree(Dtype::int16, ReduceOp::AVG, sums, b.data(), b.size(), 5);
  EXPECT_EQ(b, std::vector<std::int16_t>(1000, -2));
}

TEST(Reduce, booleans_stay_booleans) {
  const std::vector<std::vector<std::uint8_t>> inputs = {{0, 0, 1}, {0, 1, 1}};
  EXPECT_EQ(reduced(Dtype::boolean, ReduceOp::SUM, inputs), (std::vector<std::uint8_t>{0, 1, 1}));
  EXPECT_EQ(reduced(Dtype::boolean, ReduceOp::PRODUCT, inputs), (std::vector<std::uint8_t>{0, 0, 1}));
  EXPECT_EQ(reduced(Dtype::boolean, ReduceOp::BXOR, inputs), (std::vector<std::uint8_t>{0, 1, 0}));
}

TEST(Reduce, nan_wins_in_min_and_max_on_either_side) {
  const double nan = std::nan("");
  for (auto op : {ReduceOp::MIN, ReduceOp::MAX, ReduceOp::SUM, ReduceOp::PRODUCT}) {
    EXPECT_TRUE(std::isnan(reduced<double>(Dtype::float64, op, {{nan}, {1.0}})[0])) << name(op);
    EXPECT_TRUE(std::isnan(reduced<double>(Dtype::float64, op, {{1.0}, {nan}})[0])) << name(op);
  }
}

TEST(Reduce, arithmetic_of_somebody_elses_gets_the_same_job) {
  std::vector<float> a{1, 2}, b{3, 5}, result(2);
  const void* inputs[] = {a.data(), b.data()};
  void* outputs[] = {result.data()};
  bool has_it = true;
  const detail::Folds folds = [&](detail::Number number, detail::Fold fold, const detail::FoldJob& job) {
    EXPECT_EQ(number, detail::Number::f32);
    EXPECT_EQ(fold, detail::Fold::sum);
    EXPECT_EQ(job.bytes, 8u);
    EXPECT_EQ(job.divisor, 2u);
    return has_it && detail::fold_portable(number, fold, job);
  };
  detail::reduce_tree_to_all(folds, Dtype::float32, ReduceOp::AVG, inputs, outputs, 2);
  EXPECT_EQ(result, (std::vector<float>{2, 3.5}));
  has_it = false;
  EXPECT_THROW(detail::reduce_tree_to_all(folds, Dtype::float32, ReduceOp::AVG, inputs, outputs, 2), Error);
}

TEST(Reduce, what_does_not_exist_is_refused) {
  EXPECT_FALSE(detail::reducible(Dtype::int32, ReduceOp::AVG));
  EXPECT_FALSE(detail::averages_truncated(Dtype::boolean));
  EXPECT_FALSE(detail::reducible(Dtype::float32, ReduceOp::BAND));
  EXPECT_FALSE(detail::reducible(Dtype::complex64, ReduceOp::MAX));
  EXPECT_FALSE(detail::reducible(Dtype::other, ReduceOp::SUM));
  float x = 0;
  const void* inputs[] = {&x};
  EXPECT_THAT(error_of<Error>([&] { reduce_tree(Dtype::float32, ReduceOp::BXOR, inputs, &x, 1); }),
              HasSubstr("no such reduction"));
}

// --- Every dtype, reduction and level against this, one element at a time. ---------------------------------

constexpr ReduceOp kOps[] = {ReduceOp::SUM, ReduceOp::AVG,  ReduceOp::PRODUCT, ReduceOp::MIN,
                             ReduceOp::MAX, ReduceOp::BAND, ReduceOp::BOR,     ReduceOp::BXOR};
constexpr Dtype kDtypes[] = {Dtype::float32, Dtype::float64, Dtype::bfloat16,  Dtype::float16,
                             Dtype::int8,    Dtype::int16,   Dtype::int32,     Dtype::int64,
                             Dtype::uint8,   Dtype::boolean, Dtype::complex64, Dtype::complex128};

std::vector<SimdLevel> levels() {
  std::vector<SimdLevel> found;
  for (auto level : {SimdLevel::portable, SimdLevel::avx2, SimdLevel::avx512})
    if (detail::supported(level)) found.push_back(level);
  return found;
}

struct LevelScope {
  explicit LevelScope(SimdLevel level) { detail::use_simd_level(level); }
  ~LevelScope() { detail::use_simd_level(std::nullopt); }
};

using Bytes = std::vector<std::uint8_t>;

template <typename T>
T at(const Bytes& bytes, std::size_t i) {
  T value;
  std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
  return value;
}

template <typename W>
W combined(ReduceOp op, W a, W b) {
  if constexpr (std::is_floating_point_v<W>) {
    switch (op) {
      case ReduceOp::PRODUCT: return a * (std::isnan(a) ? a : b);
      case ReduceOp::MIN: return std::isnan(a) || a <= b ? a : b;
      case ReduceOp::MAX: return std::isnan(a) || a >= b ? a : b;
      default: return a + (std::isnan(a) ? a : b);
    }
  } else {
    const auto x = static_cast<std::uint64_t>(a), y = static_cast<std::uint64_t>(b);
    switch (op) {
      case ReduceOp::PRODUCT: return static_cast<W>(x * y);
      case ReduceOp::MIN: return std::min(a, b);
      case ReduceOp::MAX: return std::max(a, b);
      case ReduceOp::BAND: return static_cast<W>(x & y);
      case ReduceOp::BOR: return static_cast<W>(x | y);
      case ReduceOp::BXOR: return static_cast<W>(x ^ y);
      default: return static_cast<W>(x + y);
    }
  }
}

template <typename T, typename W = T>
Bytes reference_of(ReduceOp op, const std::vector<Bytes>& inputs) {
  Bytes result(inputs[0].size());
  std::vector<W> column(inputs.size());
  for (std::size_t i = 0; i < result.size() / sizeof(T); ++i) {
    for (std::size_t r = 0; r < inputs.size(); ++r) column[r] = static_cast<W>(at<T>(inputs[r], i));
    for (std::size_t stride = 1; stride < column.size(); stride *= 2)
      for (std::size_t r = 0; r + stride < column.size(); r += 2 * stride)
        column[r] = combined(op, column[r], column[r + stride]);
    if (op == ReduceOp::AVG && column.size() > 1)
      column[0] = static_cast<W>(column[0] / static_cast<W>(column.size()));
    const auto narrow = static_cast<T>(column[0]);
    std::memcpy(result.data() + i * sizeof(T), &narrow, sizeof(T));
  }
  return result;
}

Bytes reference(Dtype dtype, ReduceOp op, const std::vector<Bytes>& inputs) {
  switch (dtype) {
    case Dtype::float32:
    case Dtype::complex64: return reference_of<float>(op, inputs);
    case Dtype::float64:
    case Dtype::complex128: return reference_of<double>(op, inputs);
    case Dtype::bfloat16: return reference_of<c10::BFloat16, float>(op, inputs);
    case Dtype::float16: return reference_of<c10::Half, float>(op, inputs);
    case Dtype::int8: return reference_of<std::int8_t>(op, inputs);
    case Dtype::int16: return reference_of<std::int16_t>(op, inputs);
    case Dtype::int32: return reference_of<std::int32_t>(op, inputs);
    case Dtype::int64: return reference_of<std::int64_t>(op, inputs);
    case Dtype::uint8: return reference_of<std::uint8_t>(op, inputs);
    default: break;
  }
  const bool is_or = op == ReduceOp::SUM, is_and = op == ReduceOp::PRODUCT;
  return reference_of<std::uint8_t>(is_or ? ReduceOp::BOR : is_and ? ReduceOp::BAND : op, inputs);
}

// Any bits, including every kind of special number: one element in 8 is special.
Bytes elements(Dtype dtype, std::size_t count, std::mt19937& random) {
  Bytes bytes(count * detail::item_size(dtype));
  for (auto& byte : bytes)
    byte = static_cast<std::uint8_t>(dtype == Dtype::boolean ? random() % 2 : random());
  auto sprinkle = [&](auto example, auto... specials) {
    using T = decltype(example);
    const T values[] = {example, specials...};
    for (std::size_t i = 0; i < bytes.size() / sizeof(T); ++i)
      if (random() % 8 == 0)
        std::memcpy(bytes.data() + i * sizeof(T), &values[random() % std::size(values)], sizeof(T));
  };
  using u16 = std::uint16_t;
  using u32 = std::uint32_t;
  using u64 = std::uint64_t;
  // 0, -0, the smallest denormal, a large one, infinity, -infinity, NaN, one with sign and payload, a
  // signalling one, the largest number, one.
  if (dtype == Dtype::float32 || dtype == Dtype::complex64)
    sprinkle(u32{0}, 0x80000000u, 1u, 0x807fffffu, 0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc12345u,
             0x7f800321u, 0x7f7fffffu, 0x3f800000u);
  if (dtype == Dtype::float64 || dtype == Dtype::complex128)
    sprinkle(u64{0}, u64{1} << 63, u64{1}, u64{0x800fffffffffffff}, u64{0x7ff} << 52, u64{0xfff} << 52,
             u64{0x7ff8} << 48, u64{0xfff8000012345678}, u64{0x7ff0000000000321}, u64{0x7fefffffffffffff},
             u64{0x3ff} << 52);
  if (dtype == Dtype::bfloat16)
    sprinkle(u16{0}, u16{0x8000}, u16{1}, u16{0x807f}, u16{0x7f80}, u16{0xff80}, u16{0x7fc0}, u16{0xffc5},
             u16{0x7f81}, u16{0x7f7f}, u16{0x3f80});
  if (dtype == Dtype::float16)
    sprinkle(u16{0}, u16{0x8000}, u16{1}, u16{0x83ff}, u16{0x7c00}, u16{0xfc00}, u16{0x7e00}, u16{0xfe15},
             u16{0x7c01}, u16{0x7bff}, u16{0x3c00});
  return bytes;
}

// Buffers at odd addresses, with bytes around them that must not be written.
struct Buffer {
  static constexpr std::size_t kGuard = 80;
  Bytes memory;
  std::size_t start, size;

  Buffer(const Bytes& contents, std::size_t offset)
      : memory(contents.size() + offset + 2 * kGuard, 0xa5), start(kGuard + offset), size(contents.size()) {
    std::copy(contents.begin(), contents.end(), data());
  }
  std::uint8_t* data() { return memory.data() + start; }
  Bytes contents() { return {data(), data() + size}; }
  bool intact() const {
    for (std::size_t i = 0; i < memory.size(); ++i)
      if ((i < start || i >= start + size) && memory[i] != 0xa5) return false;
    return true;
  }
};

enum class Outputs { apart, in_place, mixed };

// Makes one call; every output must become `expected`, and every other input must stay unchanged.
void expect_result(Dtype dtype, ReduceOp op, const std::vector<Bytes>& inputs, const Bytes& expected,
                   Outputs outputs, std::size_t step) {
  std::vector<Buffer> in, out;
  std::vector<const void*> from;
  std::vector<void*> to;
  std::vector<bool> written(inputs.size(), outputs == Outputs::in_place);
  for (std::size_t r = 0; r < inputs.size(); ++r) in.emplace_back(inputs[r], r * step);
  for (std::size_t q = 0; q < (outputs == Outputs::apart ? 1 : 3); ++q)
    out.emplace_back(Bytes(expected.size(), 0x5a), (q + 2) * step);
  for (auto& buffer : in) from.push_back(buffer.data());
  if (outputs == Outputs::in_place) {
    for (auto& buffer : in) to.push_back(buffer.data());
    out.clear();
  } else {
    for (auto& buffer : out) to.push_back(buffer.data());
  }
  if (outputs == Outputs::mixed) {
    to.push_back(in.back().data());
    written.back() = true;
  }
  const std::size_t count = expected.size() / detail::item_size(dtype);
  if (outputs == Outputs::apart)
    reduce_tree(dtype, op, from, to[0], count);
  else
    detail::reduce_tree_to_all(dtype, op, from, to, count);
  for (auto& buffer : out) ASSERT_TRUE(buffer.contents() == expected && buffer.intact());
  for (std::size_t r = 0; r < in.size(); ++r)
    ASSERT_TRUE(in[r].contents() == (written[r] ? expected : inputs[r]) && in[r].intact());
}

TEST(Reduce, every_level_gives_the_bits_of_the_definition) {
  std::mt19937 random(3);
  for (auto dtype : kDtypes)
    for (auto op : kOps) {
      if (!detail::reducible(dtype, op)) continue;
      for (std::size_t ranks : {1, 2, 3, 4, 5, 6, 7, 8, 16, 17, 29})
        for (std::size_t count : {0, 1, 3, 37, 333}) {
          std::vector<Bytes> inputs;
          for (std::size_t r = 0; r < ranks; ++r) inputs.push_back(elements(dtype, count, random));
          const auto expected = reference(dtype, op, inputs);
          for (auto level : levels())
            for (auto outputs : {Outputs::apart, Outputs::in_place, Outputs::mixed})
              // No alignment at all, and that of an element.
              for (std::size_t step : {std::size_t{5}, detail::item_size(dtype)}) {
                SCOPED_TRACE(std::string(name(dtype)) + " " + std::string(name(op)) + ", " +
                             std::to_string(ranks) + " ranks, " + std::to_string(count) + " elements, " +
                             std::string(detail::name(level)));
                const LevelScope scope(level);
                ASSERT_NO_FATAL_FAILURE(expect_result(dtype, op, inputs, expected, outputs, step));
              }
        }
    }
}

// Like ranks on several hosts: each host sums its own inputs, in the accumulator, and the sums are added.
Bytes by_subtrees(Dtype dtype, ReduceOp op, const std::vector<Bytes>& inputs, std::size_t per_host) {
  const auto wide = detail::accumulator(dtype);
  const auto count = inputs[0].size() / detail::item_size(dtype);
  const auto partial = op == ReduceOp::AVG ? ReduceOp::SUM : op;
  std::vector<Bytes> widened, sums;
  for (const auto& input : inputs) {
    auto& bytes = widened.emplace_back(count * detail::item_size(wide));
    if (wide == dtype)
      bytes = input;
    else
      detail::widen(dtype, input.data(), bytes.data(), count);
  }
  std::vector<const void*> of_hosts;
  for (std::size_t first = 0; first < inputs.size(); first += per_host) {
    std::vector<const void*> of_host;
    for (std::size_t r = first; r < first + per_host; ++r) of_host.push_back(widened[r].data());
    reduce_tree(wide, partial, of_host, sums.emplace_back(widened[0].size()).data(), count);
  }
  for (const auto& sum : sums) of_hosts.push_back(sum.data());
  Bytes all(widened[0].size()), result(inputs[0].size());
  reduce_tree(wide, op, of_hosts, all.data(), count, inputs.size());
  if (wide == dtype) return all;
  detail::narrow(dtype, all.data(), result.data(), count);
  return result;
}

TEST(Reduce, subtrees_of_hosts_add_up_to_the_tree) {
  std::mt19937 random(4);
  for (auto dtype : kDtypes)
    for (auto op : kOps) {
      if (!detail::reducible(dtype, op)) continue;
      for (std::size_t per_host : {1, 2, 4})
        for (std::size_t hosts : {2, 3, 4, 5, 8})
          for (std::size_t count : {1, 7, 8, 16, 333}) {
            std::vector<Bytes> inputs;
            for (std::size_t r = 0; r < hosts * per_host; ++r)
              inputs.push_back(elements(dtype, count, random));
            const auto expected = reference(dtype, op, inputs);
            for (auto level : levels()) {
              const LevelScope scope(level);
              ASSERT_EQ(by_subtrees(dtype, op, inputs, per_host), expected)
                  << name(dtype) << " " << name(op) << ", " << hosts << " hosts x " << per_host << ", "
                  << count << " elements, " << detail::name(level);
            }
          }
    }
}

TEST(Reduce, every_short_float_and_how_it_is_rounded) {
  constexpr std::uint32_t kAll = 1 << 16;
  for (auto dtype : {Dtype::bfloat16, Dtype::float16})
    for (std::size_t ranks : {1, 2, 3})
      for (auto op : {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT, ReduceOp::MAX})
        for (std::uint32_t factor : {1u, 40503u, 3u}) {  // odd, so each input contains every number once
          std::vector<Bytes> inputs;
          for (std::uint32_t r = 0; r < ranks; ++r) {
            Bytes bytes(2 * kAll);
            for (std::uint32_t i = 0; i < kAll; ++i) {
              const auto number = static_cast<std::uint16_t>(r == 0 ? i : i * factor + 17 * (r - 1));
              std::memcpy(&bytes[2 * i], &number, 2);
            }
            inputs.push_back(bytes);
          }
          const auto expected = reference(dtype, op, inputs);
          for (auto level : levels()) {
            SCOPED_TRACE(std::string(name(dtype)) + " " + std::string(name(op)) + " " +
                         std::string(detail::name(level)));
            const LevelScope scope(level);
            ASSERT_NO_FATAL_FAILURE(expect_result(dtype, op, inputs, expected, Outputs::in_place, 2));
          }
        }
}

TEST(Reduce, the_environment_chooses_among_what_the_cpu_has) {
  for (auto level : levels()) {
    ScopedEnvironment scope("LOCKSTEP_SIMD", std::string(detail::name(level)));
    EXPECT_EQ(detail::wanted_simd_level(), level);
  }
  {
    ScopedEnvironment scope("LOCKSTEP_SIMD", std::nullopt);
    EXPECT_EQ(detail::wanted_simd_level(), levels().back());
  }
  ScopedEnvironment scope("LOCKSTEP_SIMD", "sse9");
  EXPECT_THAT(error_of<ConfigError>([] { detail::wanted_simd_level(); }),
              AllOf(HasSubstr("LOCKSTEP_SIMD='sse9'"), HasSubstr("portable")));
}

}  // namespace
}  // namespace lockstep::testing

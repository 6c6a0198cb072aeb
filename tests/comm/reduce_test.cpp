#include <lockstep/comm/reduce.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <lockstep/base/error.h>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

using detail::reduce_tree;

template <typename T>
std::vector<T> reduced(Dtype dtype, ReduceOp op, const std::vector<std::vector<T>>& inputs) {
  std::vector<const void*> pointers;
  for (const auto& input : inputs) pointers.push_back(input.data());
  std::vector<T> output(inputs[0].size());
  reduce_tree(dtype, op, pointers, output.data(), output.size());
  return output;
}

// The tree as the definition has it, one element at a time.
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
  // The sum overflows half, its average does not.
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

TEST(Reduce, what_does_not_exist_is_refused) {
  EXPECT_FALSE(detail::reducible(Dtype::int32, ReduceOp::AVG));
  EXPECT_FALSE(detail::reducible(Dtype::float32, ReduceOp::BAND));
  EXPECT_FALSE(detail::reducible(Dtype::complex64, ReduceOp::MAX));
  EXPECT_FALSE(detail::reducible(Dtype::other, ReduceOp::SUM));
  float x = 0;
  const void* inputs[] = {&x};
  EXPECT_THAT(error_of<Error>([&] { reduce_tree(Dtype::float32, ReduceOp::BXOR, inputs, &x, 1); }),
              HasSubstr("exist"));
}

}  // namespace
}  // namespace lockstep::testing

// The updates without LibTorch: the same bits at every vector width, however the rows are divided.
#include <lockstep/optim/update/update.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/comm/reduce/level.h>

#include "support/errors.h"

namespace lockstep::detail {
namespace {

using Row = std::vector<float>;

// Small and large numbers, zeros of both signs, denormals, infinities, NaN.
Row numbers(std::size_t count, unsigned seed, bool positive = false) {
  std::mt19937 draw(seed);
  std::normal_distribution<float> normal;
  Row row(count);
  for (float& x : row) {
    x = normal(draw);
    switch (draw() % 24) {
      case 0: x *= 1e-38f; break;  // its square is 0, and it may be denormal
      case 1: x *= 1e30f; break;
      case 2: x = 0; break;
      case 3: x = -0.0f; break;
      case 4: x = draw() % 4 ? 1e-42f : std::numeric_limits<float>::infinity(); break;
      case 5: x = draw() % 4 ? 1 : std::numeric_limits<float>::quiet_NaN(); break;
      default: break;
    }
    if (positive) x = std::abs(x);
  }
  return row;
}

// Bit patterns; all NaNs are equal.
std::vector<std::uint32_t> bits(const Row& row) {
  std::vector<std::uint32_t> result;
  for (float x : row) result.push_back(std::isnan(x) ? 0x7fc00000u : std::bit_cast<std::uint32_t>(x));
  return result;
}

struct Rows {
  Row parameter, gradient, first, second, most;
  explicit Rows(std::size_t count, unsigned seed)
      : parameter(numbers(count, seed)),
        gradient(numbers(count, seed + 1)),
        first(numbers(count, seed + 2)),
        second(numbers(count, seed + 3, true)),
        most(numbers(count, seed + 4, true)) {}
  AdamPiece adam(bool amsgrad) {
    return {parameter.data(), gradient.data(), first.data(), second.data(), amsgrad ? most.data() : nullptr,
            parameter.size()};
  }
  SgdPiece sgd(bool momentum, bool begins) {
    return {parameter.data(), gradient.data(), momentum ? first.data() : nullptr, begins, parameter.size()};
  }
  std::vector<std::vector<std::uint32_t>> all() const {
    return {bits(parameter), bits(gradient), bits(first), bits(second), bits(most)};
  }
};

void update(Rows& rows, const AdamFactors& factors, bool amsgrad, std::size_t scratch_size = 64) {
  Row scratch(scratch_size);
  const AdamSlice slices[] = {{rows.adam(amsgrad), factors}};
  adam_update(slices, 0, rows.parameter.size(), scratch, [&] { take_square_roots(scratch); });
}

class Levels : public ::testing::Test {
 protected:
  ~Levels() override { use_simd_level(std::nullopt); }
  template <typename F>
  static void on_every_level(F&& f) {
    int tried = 0;
    for (auto level : {SimdLevel::portable, SimdLevel::avx2, SimdLevel::avx512}) {
      if (!supported(level)) continue;
      use_simd_level(level);
      f(std::string(name(level)));
      ++tried;
    }
    EXPECT_GE(tried, 1);
  }
};
class Update : public Levels {};

TEST_F(Update, adam_has_the_bits_of_its_formula_at_every_width_and_length) {
  for (std::size_t count = 0; count < 70; ++count)
    for (int variant = 0; variant < 16; ++variant) {
      const bool amsgrad = variant & 1, decoupled = variant & 2, maximize = variant & 4, far = variant & 8;
      const AdamSettings settings{1e-3, far ? 0.3 : 0.9, 0.999, 1e-8, 0.01, decoupled, maximize};
      const auto f = rounded(adam_scalars(settings, 1 + variant));
      const auto seed = static_cast<unsigned>(count * 100) + static_cast<unsigned>(variant);
      Rows expected(count, seed);
      for (std::size_t i = 0; i < count; ++i) {
        auto& p = expected.parameter[i];
        float g = expected.gradient[i];
        if (maximize) g = -g;
        if (!decoupled) g = std::fma(p, f.l2, g);
        auto &m = expected.first[i], &v = expected.second[i], &w = expected.most[i];
        m = far ? std::fma(f.first_weight - 1, g - m, g) : std::fma(f.first_weight, g - m, m);
        const float kept = v * f.second_keep, weighted = f.second_weight * g;
        v = std::fma(weighted, g, kept);
        if (amsgrad) w = std::isnan(w) || std::isnan(v) ? NAN : std::max(w, v);
        const float quotient = std::sqrt(amsgrad ? w : v) / f.root_divisor, divisor = quotient + f.eps;
        const float shrunk = p * f.shrink, moved = f.step_size * m;
        const float change = moved / divisor;
        p = shrunk + change;
      }
      on_every_level([&](const std::string& level) {
        Rows rows(count, seed);
        update(rows, f, amsgrad);
        EXPECT_EQ(rows.all(), expected.all()) << level << ", " << count << " numbers, variant " << variant;
      });
    }
}

TEST_F(Update, sgd_has_the_bits_of_its_formula_at_every_width_and_length) {
  for (std::size_t count = 0; count < 70; ++count)
    for (int variant = 0; variant < 32; ++variant) {
      const bool momentum = variant & 1, first = variant & 2, nesterov = variant & 4, l2 = variant & 8;
      const SgdFactors f{-0.1f, 0.9f, 0.75f, l2 ? 0.01f : 0, (variant & 16) != 0, nesterov};
      const auto seed = static_cast<unsigned>(count * 100) + static_cast<unsigned>(variant);
      Rows expected(count, seed);
      for (std::size_t i = 0; i < count; ++i) {
        auto &p = expected.parameter[i], &b = expected.first[i];
        float g = f.maximize ? -expected.gradient[i] : expected.gradient[i];
        if (l2) g = std::fma(p, f.l2, g);
        if (momentum) {
          const float kept = b * f.momentum;
          b = first ? g : std::fma(g, f.weight, kept);
          g = nesterov ? std::fma(b, f.momentum, g) : b;
        }
        p = std::fma(g, f.step_size, p);
      }
      on_every_level([&](const std::string& level) {
        Rows rows(count, seed);
        const SgdSlice slices[] = {{rows.sgd(momentum, first), f}};
        sgd_update(slices, 0, count);
        EXPECT_EQ(rows.all(), expected.all()) << level << ", " << count << " numbers, variant " << variant;
      });
    }
}

TEST_F(Update, rows_may_be_cut_anywhere) {
  const auto f = rounded(adam_scalars({1e-3, 0.9, 0.999, 1e-8, 0.01, true, false}, 7));
  const SgdFactors sgd{-0.1f, 0.9f, 1, 0, false, false};
  const std::size_t count = 1000;
  Rows whole(count, 5), whole_sgd(count, 5);
  update(whole, f, true);
  const SgdSlice one[] = {{whole_sgd.sgd(true, false), sgd}};
  sgd_update(one, 0, count);
  std::mt19937 draw(3);
  for (int round = 0; round < 200; ++round) {
    // The same rows as slices, some of them empty, and processed in shares, with scratch of any size.
    Rows rows(count, 5), rows_sgd(count, 5);
    std::vector<AdamSlice> slices;
    std::vector<SgdSlice> sgd_slices;
    for (std::size_t at = 0; at < count;) {
      const std::size_t n = std::min<std::size_t>(draw() % 90, count - at);
      auto p = rows.adam(true);
      slices.push_back(
          {{p.parameter + at, p.gradient + at, p.exp_avg + at, p.exp_avg_sq + at, p.max_exp_avg_sq + at, n},
           f});
      auto q = rows_sgd.sgd(true, false);
      sgd_slices.push_back({{q.parameter + at, q.gradient + at, q.momentum_buffer + at, false, n}, sgd});
      at += n;
    }
    Row scratch(1 + draw() % 300);
    for (std::size_t at = 0; at < count;) {
      const std::size_t n = std::min<std::size_t>(draw() % 400, count - at);
      adam_update(slices, at, n, scratch, [&] { take_square_roots(scratch); });
      sgd_update(sgd_slices, at, n);
      at += n;
    }
    ASSERT_EQ(rows.all(), whole.all());
    ASSERT_EQ(rows_sgd.all(), whole_sgd.all());
  }
}

TEST_F(Update, nothing_beside_the_rows_is_touched) {
  on_every_level([](const std::string& level) {
    for (std::size_t count = 1; count < 40; ++count) {
      Rows rows(count + 2, 9);
      const Rows before = rows;
      auto p = rows.adam(true);
      const auto f = rounded(adam_scalars({1e-3, 0.9, 0.999, 1e-8, 0, false, false}, 1));
      const AdamSlice slices[] = {
          {{p.parameter + 1, p.gradient + 1, p.exp_avg + 1, p.exp_avg_sq + 1, p.max_exp_avg_sq + 1, count},
           f}};
      Row scratch(7);
      adam_update(slices, 0, count, scratch, [&] { take_square_roots(scratch); });
      const auto now = rows.all(), then = before.all();
      for (std::size_t r = 0; r < now.size(); ++r) {
        EXPECT_EQ(now[r].front(), then[r].front()) << level;
        EXPECT_EQ(now[r].back(), then[r].back()) << level;
      }
    }
  });
}

TEST_F(Update, more_elements_than_there_are_is_an_error) {
  Rows rows(10, 1);
  const SgdSlice slices[] = {{rows.sgd(false, false), SgdFactors{}}};
  EXPECT_THROW(sgd_update(slices, 4, 7), Error);
  sgd_update(slices, 10, 0);
}

}  // namespace
}  // namespace lockstep::detail

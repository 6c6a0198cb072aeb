#include <lockstep/data/core/permutation.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

using detail::Permutation;

std::vector<std::uint64_t> order(std::uint64_t size, std::uint64_t key) {
  const Permutation permutation(size, key);
  std::vector<std::uint64_t> found(size);
  for (std::uint64_t i = 0; i < size; ++i) found[i] = permutation(i);
  return found;
}

TEST(Permutation, every_number_comes_once) {
  std::vector<std::uint64_t> sizes(300);
  std::iota(sizes.begin(), sizes.end(), 0);
  for (const auto size : {1023, 1024, 1025, 4096, 10007, 65535, 65536, 65537, 100000}) sizes.push_back(size);
  for (const auto size : sizes)
    for (std::uint64_t key = 0; key < 5; ++key) {
      auto found = order(size, key);
      std::sort(found.begin(), found.end());
      for (std::uint64_t i = 0; i < size; ++i) ASSERT_EQ(found[i], i) << size << " " << key;
    }
}

TEST(Permutation, huge_sizes_need_no_more_than_small_ones) {
  const std::uint64_t size = (std::uint64_t{1} << 62) + 12345;
  const Permutation permutation(size, 7);
  std::vector<std::uint64_t> found;
  for (std::uint64_t i = 0; i < 100000; ++i) found.push_back(permutation(size - 1 - i));
  std::sort(found.begin(), found.end());
  EXPECT_EQ(std::adjacent_find(found.begin(), found.end()), found.end());
  EXPECT_LT(found.back(), size);
  EXPECT_GT(found.back(), size - size / 1000);
  EXPECT_LT(found.front(), size / 1000);
}

// Chi-square of the frequencies of all orders of a few samples, over many keys. A fair shuffle stays within 5
// standard deviations of the degrees of freedom.
TEST(Permutation, each_order_of_a_few_is_as_likely) {
  for (const std::uint64_t size : {2, 3, 4, 5}) {
    std::map<std::vector<std::uint64_t>, int> counts;
    const int draws = 60000;
    for (int key = 0; key < draws; ++key) ++counts[order(size, static_cast<std::uint64_t>(key))];
    double orders = 1;
    for (std::uint64_t i = 2; i <= size; ++i) orders *= static_cast<double>(i);
    double chi = (orders - static_cast<double>(counts.size())) * draws / orders;
    for (const auto& [_, count] : counts) chi += std::pow(count - draws / orders, 2) / (draws / orders);
    EXPECT_LT(chi, orders - 1 + 5 * std::sqrt(2 * (orders - 1))) << size;
  }
}

// Positions and neighbours are uniform, over many keys and within one order.
TEST(Permutation, places_and_neighbours_are_even) {
  for (const std::uint64_t size : {1000, 5000}) {
    std::vector<double> first(10), gap(10);
    for (std::uint64_t key = 0; key < 20000; ++key) {
      const Permutation permutation(size, key);
      ++first[permutation(17) * 10 / size];
      ++gap[(permutation(18) + size - permutation(17)) % size * 10 / size];
    }
    std::vector<double> neighbours(10);
    const Permutation large(1000003, 3);
    for (std::uint64_t i = 0; i + 1 < 20000; ++i)
      ++neighbours[(large(i + 1) + large.size() - large(i)) % large.size() * 10 / large.size()];
    for (const auto& counts : {first, gap, neighbours}) {
      double chi = 0;
      for (const double count : counts) chi += std::pow(count - 2000, 2) / 2000;
      EXPECT_LT(chi, 9 + 5 * std::sqrt(18.0)) << size;
    }
  }
}

TEST(Permutation, keys_that_follow_one_another_give_orders_without_likeness) {
  for (const std::uint64_t size : {1000, 5000}) {
    int same = 0;
    for (std::uint64_t key = 0; key < 100; ++key) {
      const auto a = order(size, key), b = order(size, key + 1);
      for (std::size_t i = 0; i < a.size(); ++i) same += a[i] == b[i];
    }
    EXPECT_NEAR(same, 100, 60) << size;  // one position of each order by chance
  }
}

}  // namespace
}  // namespace lockstep::testing

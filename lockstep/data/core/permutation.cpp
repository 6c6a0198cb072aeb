#include <lockstep/data/core/permutation.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include <lockstep/base/error.h>

namespace lockstep::detail {
namespace {

// Maps x to a number below `limit` using all its bits: the upper half of their product.
std::uint64_t scaled(std::uint64_t x, std::uint64_t limit) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::uint64_t>((static_cast<Wide>(x) * limit) >> 64);
}

std::uint64_t sum(std::uint64_t x, std::uint64_t y, std::uint64_t modulus) {  // x, y < modulus
  const auto s = x + y;
  return s >= modulus ? s - modulus : s;
}

}  // namespace

std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

Permutation::Permutation(std::uint64_t size, std::uint64_t key) : size_(size) {
  LOCKSTEP_ASSERT(size < std::uint64_t{1} << 63, "permutation size out of range");
  a_ = std::max<std::uint64_t>(1, static_cast<std::uint64_t>(std::sqrt(static_cast<double>(size))));
  b_ = std::max<std::uint64_t>(1, (size + a_ - 1) / a_);
  for (auto& each : keys_) each = key = mixed(key);
  if (size > kTable) return;
  table_.resize(size);
  std::iota(table_.begin(), table_.end(), std::uint16_t{0});
  for (auto left = size; left > 1; --left)
    std::swap(table_[left - 1], table_[scaled(key = mixed(key), left)]);
}

std::uint64_t Permutation::operator()(std::uint64_t place) const {
  LOCKSTEP_ASSERT(place < size_, "position out of range");
  if (!table_.empty()) return table_[place];
  do {
    std::uint64_t high = place / b_, low = place % b_;
    for (int i = 0; i < kRounds; i += 2) {
      high = sum(high, scaled(mixed(low ^ keys_[i]), a_), a_);
      low = sum(low, scaled(mixed(high ^ keys_[i + 1]), b_), b_);
    }
    place = high * b_ + low;
  } while (place >= size_);
  return place;
}

}  // namespace lockstep::detail

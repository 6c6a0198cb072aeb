// A random order of 0 .. size-1, worked out place by place: nothing is stored and nothing is shuffled, so
// that the middle of an order of any size is there at once. A Feistel network over two digits, a * b >= size,
// with sums in place of exclusive ors. Fewer than sqrt(size) of the a * b places lie outside, and are sent
// round again. Up to 4096, where two digits are too few to reach every order, it is a shuffled table.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace lockstep::detail {

// Each bit of the result depends on each bit of x.
std::uint64_t mixed(std::uint64_t x);

class Permutation {
 public:
  Permutation(std::uint64_t size, std::uint64_t key);  // size < 2^63
  std::uint64_t size() const { return size_; }
  std::uint64_t operator()(std::uint64_t place) const;  // place < size

 private:
  static constexpr int kRounds = 8;
  static constexpr std::uint64_t kTable = 4096;
  std::uint64_t size_, a_, b_;
  std::array<std::uint64_t, kRounds> keys_;
  std::vector<std::uint16_t> table_;
};

}  // namespace lockstep::detail

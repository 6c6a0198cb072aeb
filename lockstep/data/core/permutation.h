// A random permutation of 0 .. size-1, computed one position at a time. It stores and shuffles nothing, so
// the middle of a permutation of any size is available immediately. It is a Feistel network over two digits,
// a * b >= size, with sums in place of exclusive ors. Fewer than sqrt(size) of the a * b positions lie
// outside the range; those are mapped again. Up to a size of 4096, two digits are too few to reach every
// permutation, so a shuffled table is used.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace lockstep::detail {

// Hashes x: each bit of the result depends on each bit of x.
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

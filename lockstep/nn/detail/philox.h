// Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): computes four random
// words from a counter and a key, without state. Does not use LibTorch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace lockstep::nn::detail {

// Advances kLanes counters at once, word by word, so that compilers can vectorise each round.
inline constexpr std::size_t kPhiloxLanes = 16;
struct PhiloxBlocks {
  using Words = std::array<std::uint32_t, kPhiloxLanes>;
  std::array<Words, 4> words;  // [word of the counter][lane]
};

inline void philox(PhiloxBlocks& blocks, std::uint32_t key0, std::uint32_t key1) {
  auto& [w0, w1, w2, w3] = blocks.words;
  for (int round = 0; round < 10; ++round) {
    for (std::size_t i = 0; i < kPhiloxLanes; ++i) {
      const std::uint64_t a = std::uint64_t{0xD2511F53} * w0[i], b = std::uint64_t{0xCD9E8D57} * w2[i];
      w0[i] = static_cast<std::uint32_t>(b >> 32) ^ w1[i] ^ key0;
      w1[i] = static_cast<std::uint32_t>(b);
      w2[i] = static_cast<std::uint32_t>(a >> 32) ^ w3[i] ^ key1;
      w3[i] = static_cast<std::uint32_t>(a);
    }
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
}

}  // namespace lockstep::nn::detail

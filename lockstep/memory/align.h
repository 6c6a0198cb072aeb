// Rounding sizes to cache lines and pages.
#pragma once

#include <cstddef>

namespace lockstep::memory {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kCacheLine = 64;

constexpr std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace lockstep::memory

// Shared by all targets: reading the input piece by piece, and checks that abort the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace lockstep::fuzz {

// Aborts if the condition is false; libFuzzer then reports the input.
inline void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "check failed: %s\n", what);
  std::abort();
}

// Hands out the input piece by piece; zeros and empty pieces once it is used up.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : left_(reinterpret_cast<const char*>(data), size) {}

  bool empty() const { return left_.empty(); }
  std::uint8_t byte() {
    const auto piece = bytes(1);
    return piece.empty() ? 0 : static_cast<std::uint8_t>(piece[0]);
  }
  std::string_view bytes(std::size_t most) {
    const auto piece = left_.substr(0, most);
    left_.remove_prefix(piece.size());
    return piece;
  }
  std::string_view rest() { return bytes(left_.size()); }

 private:
  std::string_view left_;
};

}  // namespace lockstep::fuzz

#include <lockstep/comm/transports/shm/engine/stage_copy.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>

#include <lockstep/memory/align.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace lockstep::shm {
namespace {

// Smaller copies are not worth two clock reads, and their times prove little.
constexpr std::size_t kPlainCopy = 16 << 10;
// Measured (docs/evidence/benchmarks.md): processors that are near take 1.4 times as long with ordinary stores, far
// ones 7 times. The reader's gain from ordinary stores, if it is near, is not included.
constexpr double kFar = 3;

}  // namespace

double StageCopy::Recent::least() const noexcept {
  const auto known = next < costs.size() ? next : costs.size();
  return known == 0 ? 0
                    : *std::min_element(costs.begin(), costs.begin() + static_cast<std::ptrdiff_t>(known));
}

void StageCopy::note(bool streamed, double cost) noexcept {
  Recent& recent = streamed ? streamed_ : ordinary_;
  recent.costs[recent.next++ % recent.costs.size()] = cost;
  ++count_;
  if (ordinary_.next > 0 && streamed_.next > 0) streams_ = ordinary_.least() > kFar * streamed_.least();
}

void StageCopy::copy(void* to, const void* from, std::size_t bytes) noexcept {
  if (bytes < kPlainCopy) {
    if (bytes != 0) std::memcpy(to, from, bytes);
    return;
  }
  const bool streamed = streams_ != tries();
  const auto start = std::chrono::steady_clock::now();
  if (streamed)
    stream_bytes(to, from, bytes);
  else
    std::memcpy(to, from, bytes);
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
  note(streamed, took.count() / static_cast<double>(bytes));
}

void stream_bytes(void* to, const void* from, std::size_t bytes) noexcept {
#if defined(__x86_64__)
  constexpr auto kLine = memory::kCacheLine;
  auto* out = static_cast<char*>(to);
  const auto* in = static_cast<const char*>(from);
  const auto first = std::min(bytes, (kLine - reinterpret_cast<std::uintptr_t>(out) % kLine) % kLine);
  if (first != 0) std::memcpy(out, in, first);
  std::size_t at = first;
  for (; at + kLine <= bytes; at += kLine) {
    const auto* source = reinterpret_cast<const __m128i*>(in + at);
    auto* target = reinterpret_cast<__m128i*>(out + at);
    const __m128i words[] = {_mm_loadu_si128(source), _mm_loadu_si128(source + 1),
                             _mm_loadu_si128(source + 2), _mm_loadu_si128(source + 3)};
    for (int i = 0; i < 4; ++i) _mm_stream_si128(target + i, words[i]);
  }
  if (at < bytes) std::memcpy(out + at, in + at, bytes - at);
  _mm_sfence();
#else
  if (bytes != 0) std::memcpy(to, from, bytes);
#endif
}

}  // namespace lockstep::shm

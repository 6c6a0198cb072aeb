// Copies into memory that a peer has just read. If the two processors are far from each other (two sockets,
// two chiplets, or wherever a hypervisor has placed them), an ordinary store must first take every line from
// the peer's cache: 2 GB/s on a machine that copies at 20. Non-temporal stores avoid that, but then the peer
// reads from further away, which is slower if the two are near. So both kinds are tried from time to time.
#pragma once

#include <array>
#include <cstddef>

namespace lockstep::shm {

class StageCopy {
 public:
  void copy(void* to, const void* from, std::size_t bytes) noexcept;

  // Measurements of `copy`, in nanoseconds per byte. Public for tests.
  void note(bool streamed, double cost) noexcept;
  bool streams() const noexcept { return streams_; }
  // True if the next copy uses the other kind, to measure it.
  bool tries() const noexcept { return count_ % kBetweenTries == 0; }

 private:
  static constexpr unsigned kBetweenTries = 64;

  // The minimum of the last few, because a thread may lose its processor in the middle of a copy.
  struct Recent {
    std::array<double, 4> costs{};  // 0: none yet
    std::size_t next = 0;
    double least() const noexcept;
  };

  Recent ordinary_, streamed_;
  bool streams_ = false;
  unsigned count_ = 1;
};

// Like memcpy, with non-temporal stores. They are all visible to a thread that sees a later store.
void stream_bytes(void* to, const void* from, std::size_t bytes) noexcept;

}  // namespace lockstep::shm

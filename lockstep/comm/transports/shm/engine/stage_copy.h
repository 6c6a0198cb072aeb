// Copies into memory that a peer has just read. Where the two processors are far from one another (two
// sockets, two chiplets, or where a hypervisor has put them for now) an ordinary store takes every line away
// from the other's cache first: 2 GB/s on a machine that copies at 20. Stores past the cache do not, but then
// the peer reads from further away, which is slower where the two are near. So both are tried now and then.
#pragma once

#include <array>
#include <cstddef>

namespace lockstep::shm {

class StageCopy {
 public:
  void copy(void* to, const void* from, std::size_t bytes) noexcept;

  // What `copy` has learned; given by hand in tests. Nanoseconds a byte.
  void note(bool streamed, double cost) noexcept;
  bool streams() const noexcept { return streams_; }
  // Whether the next one is of the other kind, to see what that takes.
  bool tries() const noexcept { return count_ % kBetweenTries == 0; }

 private:
  static constexpr unsigned kBetweenTries = 64;

  // The least of the last few: a thread may lose its processor in the middle of any of them.
  struct Recent {
    std::array<double, 4> costs{};  // 0: none yet
    std::size_t next = 0;
    double least() const noexcept;
  };

  Recent ordinary_, streamed_;
  bool streams_ = false;
  unsigned count_ = 1;
};

// As memcpy, with stores that go past the cache; all of them are visible to whoever sees a later store.
void stream_bytes(void* to, const void* from, std::size_t bytes) noexcept;

}  // namespace lockstep::shm

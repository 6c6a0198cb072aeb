// Segment: memory that other processes of this host can map. It is a memfd, sealed so that it cannot shrink
// under its users, with all pages allocated from the start, so that no access can fail. It has no name and
// disappears with the last process that maps it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include <lockstep/os/host.h>
#include <lockstep/os/socket.h>

namespace lockstep::shm {

class Segment {
 public:
  // Throws ConfigError if the memory is not available; nothing has been allocated then.
  static std::shared_ptr<Segment> make(std::size_t bytes);
  // Maps a peer's segment, received over a socket. Throws Error unless it is a segment of that size.
  static std::shared_ptr<Segment> map(control::Fd fd, std::size_t bytes);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  char* data() const { return data_; }
  std::size_t size() const { return size_; }
  int fd() const { return fd_.get(); }  // on the owner; a peer closes it
  // Called by the owner when the segment is no longer needed: returns its pages to the system at once, even
  // if a peer still has it mapped.
  void give_back() noexcept;

 private:
  Segment(control::Fd fd, std::size_t bytes);
  void enter() noexcept;

  control::Fd fd_;
  std::size_t size_ = 0;
  char* data_ = nullptr;
};

// Checks that this much memory may be allocated: beyond a cgroup's limit fallocate does not fail, and the
// kernel kills a process. Throws ConfigError with what is needed and what is available. taken: bytes of it
// that are already allocated.
void check_memory(std::size_t bytes, const host::Root& root = "/", std::size_t taken = 0);

}  // namespace lockstep::shm

// Memory that other processes of this host can map: a memfd, sealed so that nobody can cut it off under
// those who use it, with all its pages there from the start, so that no touch can fail. It has no name and is
// gone with the last process that has it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include <lockstep/os/host.h>
#include <lockstep/os/socket.h>

namespace lockstep::shm {

class Segment {
 public:
  // ConfigError where the memory is not there; nothing has been taken then.
  static std::shared_ptr<Segment> make(std::size_t bytes);
  // A peer's, as it came over a socket. Throws Error for what is not a segment of that size.
  static std::shared_ptr<Segment> map(control::Fd fd, std::size_t bytes);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  char* data() const { return data_; }
  std::size_t size() const { return size_; }
  int fd() const { return fd_.get(); }  // of its owner; a peer needs none
  // By its owner, when nobody needs it any longer: its pages go back to the system at once, also where a peer
  // still has it mapped.
  void give_back() noexcept;

 private:
  Segment(control::Fd fd, std::size_t bytes);
  void enter() noexcept;

  control::Fd fd_;
  std::size_t size_ = 0;
  char* data_ = nullptr;
};

// Whether this much may be taken: fallocate beyond a cgroup's limit has the kernel end a process instead of
// failing. ConfigError with what is needed and what there is. taken: so much of it is there already.
void check_memory(std::size_t bytes, const host::Root& root = "/", std::size_t taken = 0);

}  // namespace lockstep::shm

// Shared memory that this process owns, in pieces: tensors from Group::allocate, and staging for plain ones.
// Any thread. What is freed is used again; a segment that is free as a whole goes back to the system when
// much more is held than is in use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>

#include <lockstep/comm/transports/shm/engine/segment.h>
#include <lockstep/memory/heap.h>

namespace lockstep::shm {

// Where something lies, as a peer can find it.
struct Place {
  std::uint64_t segment = 0;  // of its owner; 0: nowhere
  std::uint64_t offset = 0;
};

class Arena {
 public:
  // The process's own. It is never destroyed: tensors may outlive everything else.
  static Arena& instance();

  // Aligned to 64 bytes, larger ones to a page; ConfigError as Segment::make. Without grow, null where none
  // is held that fits.
  void* allocate(std::size_t bytes, bool grow = true);
  void free(void* pointer) noexcept;
  // Of memory that lies in one segment as a whole.
  Place find(const void* pointer, std::size_t bytes) const;
  std::shared_ptr<Segment> segment(std::uint64_t id) const;  // null: given back

  struct Figures {
    std::size_t held = 0, used = 0, segments = 0;
  };
  Figures figures() const;

 private:
  struct Owned {
    std::uint64_t id = 0;
    std::shared_ptr<Segment> segment;
  };

  void give_back_what_is_too_much();
  void after_fork();

  std::unique_ptr<std::shared_mutex> mutex_ = std::make_unique<std::shared_mutex>();
  memory::Heap heap_;
  std::map<const char*, Owned> segments_;  // by address
  std::map<std::uint64_t, const char*> by_id_;
  std::uint64_t next_id_ = 1;
};

}  // namespace lockstep::shm

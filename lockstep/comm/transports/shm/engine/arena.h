// Arena: shared memory that this process owns, for tensors from Group::allocate and for staging of plain
// ones. Thread-safe. Freed memory is reused; a segment that is entirely free is returned to the system when
// much more memory is held than is in use.
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

// Location of memory, as a peer can find it.
struct Place {
  std::uint64_t segment = 0;  // number given by its owner; 0: none
  std::uint64_t offset = 0;
};

class Arena {
 public:
  // The process's own arena. Never destroyed, because tensors may outlive everything else.
  static Arena& instance();

  // Aligned to 64 bytes, larger blocks to a page. Throws ConfigError as Segment::make does. Without grow,
  // returns null unless a held segment has room.
  void* allocate(std::size_t bytes, bool grow = true);
  void free(void* pointer) noexcept;
  // Finds memory that lies entirely within one segment.
  Place find(const void* pointer, std::size_t bytes) const;
  std::shared_ptr<Segment> segment(std::uint64_t id) const;  // null: already returned

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

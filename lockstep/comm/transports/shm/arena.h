// Shared memory that this process owns, in pieces: tensors from Group::allocate, and staging for plain ones.
// Any thread. What is freed is used again; a segment that is free as a whole goes back to the system when
// much more is held than is in use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>

#include <lockstep/comm/transports/shm/segment.h>

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

  void* allocate(
      std::size_t bytes);  // aligned to 64 bytes, larger ones to a page; ConfigError as Segment::make
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
    std::map<std::size_t, std::size_t> free;  // offset to length
  };
  using Segments = std::map<std::uintptr_t, Owned>;  // by address

  void insert_segment(std::shared_ptr<Segment> segment);
  void insert_free(Owned& owned, std::size_t offset, std::size_t length);
  void erase_free(Owned& owned, std::map<std::size_t, std::size_t>::iterator block);
  void give_back_what_is_too_much();
  void after_fork();

  std::unique_ptr<std::shared_mutex> mutex_ = std::make_unique<std::shared_mutex>();
  Segments segments_;
  std::map<std::uint64_t, std::uintptr_t> by_id_;
  std::set<std::pair<std::size_t, std::uintptr_t>> by_length_;  // free blocks: length, address
  std::map<std::uintptr_t, std::size_t> used_;                  // address to length
  std::size_t held_bytes_ = 0, used_bytes_ = 0;
  std::uint64_t next_id_ = 1;
};

}  // namespace lockstep::shm

// A process's private memory for a Cache: large mapped regions, in huge pages if available. A child of fork()
// has a copy, as of all its memory.
#pragma once

#include <mutex>

#include <lockstep/memory/cache.h>
#include <lockstep/memory/heap.h>
#include <lockstep/os/host.h>

namespace lockstep::memory {

class System final : public Source {
 public:
  explicit System(host::Root root = "/");  // Must never be destroyed, like the Cache.
  char* take(std::size_t bytes, bool grow) override;
  void give(char* block) noexcept override;
  void trim() noexcept override;
  std::size_t held() const override;

 private:
  Heap::Region map(std::size_t bytes) const;

  const host::Root root_;
  mutable std::mutex mutex_;
  Heap heap_;
};

}  // namespace lockstep::memory

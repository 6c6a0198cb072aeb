// A caching allocator: memory that one training step frees is reused by the next without system calls.
// Thread-safe.
//
// Every block has a header that names its owner. Small blocks have size classes and are cached by the thread
// that freed them, so that most calls take no lock; large blocks are kept by length in one place. Large
// blocks that have been idle for a while are returned to the source; small ones stay, because they are small.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <lockstep/base/error.h>

namespace lockstep::memory {

// No memory is left on this host, or within the cgroup's limit.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

// The source of a cache's memory. Thread-safe.
class Source {
 public:
  virtual ~Source() = default;
  // Page-aligned. Throws OutOfMemory if there is none; without grow, returns null if no held memory fits.
  virtual char* take(std::size_t bytes, bool grow) = 0;
  virtual void give(char* block) noexcept = 0;
  virtual void trim() noexcept {}        // Returns unused memory to the system.
  virtual std::size_t held() const = 0;  // Bytes held from the system.
};

// Requested bytes in use, of one or several caches, and their peak.
struct Usage {
  std::atomic<std::int64_t> allocated = 0, peak = 0;
  void add(std::int64_t bytes) {
    const auto now = allocated.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    auto most = peak.load(std::memory_order_relaxed);
    while (now > most && !peak.compare_exchange_weak(most, now, std::memory_order_relaxed)) {
    }
  }
  void reset_peak() { peak.store(allocated.load()); }
};

class Cache {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t kAlignment = 64;

  // Must never be destroyed: tensors may outlive everything else. Each thread caches small blocks for only
  // one cache, the first one it uses. usage: also updated.
  explicit Cache(Source& source, Usage* usage = nullptr);
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  void* allocate(std::size_t bytes);        // Throws OutOfMemory with the sizes needed and held.
  static void free(void* memory) noexcept;  // Of any cache; null is a no-op.
  // Returns to the source the blocks that have been idle since the previous call. Runs automatically every
  // ten seconds while there are calls.
  void release_unused();
  void release_all();  // Releases all free blocks that no thread caches.

  struct Figures {
    std::int64_t allocated = 0;              // Requested bytes in use.
    std::int64_t reserved = 0;               // Bytes held from the system.
    std::int64_t allocations = 0, hits = 0;  // Totals; hits were served from freed blocks.
  };
  Figures figures() const;
  // For a forked child: memory shared with the parent is neither given out nor taken back there.
  void disown();
  bool is_disowned() const { return disowned_.load(std::memory_order_relaxed); }

 private:
  struct Header;
  struct Bins;
  struct Bin {
    Header* first = nullptr;
    std::size_t count = 0;  // For a thread's bin.
  };
  struct Kept {
    Header* block;
    std::uint64_t since;  // Number of release_unused() calls before.
  };

  static constexpr std::size_t kClasses = 36;
  static std::size_t class_of(std::size_t length);
  static std::size_t length_of(std::size_t number);
  static std::size_t batch_of(std::size_t number);
  static Bins& bins();

  Header* take_small(std::size_t number, bool& hit);
  Header* take_large(std::size_t length, bool& hit);
  // Fills the bin from the shared blocks. Returns false if new blocks had to be cut.
  bool fill(Bin& bin, std::size_t number, std::size_t count);
  char* take_new(std::size_t bytes);
  void keep_small(Header* block) noexcept;
  void keep_large(Header* block) noexcept;
  void release_large(std::uint64_t before);
  void release_in_time(Clock::time_point now);

  Source& source_;
  Usage* const usage_;
  std::mutex mutex_;
  Bin central_[kClasses];
  std::map<std::size_t, std::vector<Kept>> large_;  // By length.
  std::uint64_t releases_ = 0;
  Clock::time_point next_release_;
  std::uint32_t calls_ = 0;
  std::atomic<bool> disowned_ = false;
  std::atomic<std::int64_t> allocated_ = 0, allocations_ = 0, hits_ = 0;
};

}  // namespace lockstep::memory

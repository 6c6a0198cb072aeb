// Memory that is given out, taken back and given out again, without the kernel: what a training step frees,
// the next one needs. Any thread.
//
// Every block has a header in front of it, which says whose it is. Small ones have size classes and are kept
// by the thread that freed them, so that most calls take no lock; large ones are kept by their length, in one
// place. What has been of no use for a while goes back to where it came from, but for small ones: those stay,
// for their size.
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

// There is no more: of this host's, or of what the cgroup allows.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

// Where a cache has its memory from. Any thread.
class Source {
 public:
  virtual ~Source() = default;
  // Aligned to a page. OutOfMemory where there is none; without grow, null where none is held that fits.
  virtual char* take(std::size_t bytes, bool grow) = 0;
  virtual void give(char* block) noexcept = 0;
  virtual void trim() noexcept {}        // what nobody has taken goes back to the system
  virtual std::size_t held() const = 0;  // of the system
};

// Bytes that were asked for and are in use, of one or several caches; the most of them.
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

  // It is never destroyed: tensors may outlive everything else. One cache of a thread's, the first that it
  // uses, keeps small blocks with the thread. usage: also counted there.
  explicit Cache(Source& source, Usage* usage = nullptr);
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  void* allocate(std::size_t bytes);        // OutOfMemory names what is needed and what is held
  static void free(void* memory) noexcept;  // of any cache; null is nothing
  // What has not been used since the call before this one goes back to the source. By itself it does so every
  // ten seconds, while there are calls.
  void release_unused();
  void release_all();  // all that is free and not a thread's

  struct Figures {
    std::int64_t allocated = 0;              // bytes that were asked for and are in use
    std::int64_t reserved = 0;               // bytes held of the system
    std::int64_t allocations = 0, hits = 0;  // so far; of those, out of what was freed before
  };
  Figures figures() const;
  // In a forked child: memory that is shared with the parent is not given out or taken back here.
  void disown();
  bool is_disowned() const { return disowned_.load(std::memory_order_relaxed); }

 private:
  struct Header;
  struct Bins;
  struct Bin {
    Header* first = nullptr;
    std::size_t count = 0;  // of a thread's
  };
  struct Kept {
    Header* block;
    std::uint64_t since;  // how often release_unused() had been called
  };

  static constexpr std::size_t kClasses = 36;
  static std::size_t class_of(std::size_t length);
  static std::size_t length_of(std::size_t number);
  static std::size_t batch_of(std::size_t number);
  static Bins& bins();

  Header* take_small(std::size_t number, bool& hit);
  Header* take_large(std::size_t length, bool& hit);
  // From what threads gave back; false: cut anew.
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
  std::map<std::size_t, std::vector<Kept>> large_;  // by length
  std::uint64_t releases_ = 0;
  Clock::time_point next_release_;
  std::uint32_t calls_ = 0;
  std::atomic<bool> disowned_ = false;
  std::atomic<std::int64_t> allocated_ = 0, allocations_ = 0, hits_ = 0;
};

}  // namespace lockstep::memory

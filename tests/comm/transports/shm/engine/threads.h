// Ranks of a group in shared memory that are threads of this process, all on one mapping.
#pragma once

#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <lockstep/comm/transports/shm/engine/engine.h>

namespace lockstep::shm {

// Plain memory, part of which counts as shared.
class ThreadMemory final : public Memory {
 public:
  char* take(std::size_t bytes, bool shared) {
    char* memory = static_cast<char*>(std::aligned_alloc(64, (bytes + 127) / 64 * 64));
    std::lock_guard lock(mutex_);
    if (shared) shared_[memory] = bytes;
    return memory;
  }
  void drop(char* memory) {
    std::lock_guard lock(mutex_);
    shared_.erase(memory);
    std::free(memory);
  }

  Place find(const void* pointer, std::size_t bytes) override {
    const char* address = static_cast<const char*>(pointer);
    std::lock_guard lock(mutex_);
    auto above = shared_.upper_bound(const_cast<char*>(address));
    if (above == shared_.begin()) return {};
    --above;
    if (address + bytes > above->first + above->second) return {};
    return {1, reinterpret_cast<std::uint64_t>(address)};
  }
  char* map(int rank, Place place, std::size_t, const WaitLimit&) override {
    if (on_map) on_map(rank, place);
    return reinterpret_cast<char*>(place.offset);
  }
  char* allocate(std::size_t bytes) override { return take(bytes, true); }
  void free(char* memory) noexcept override { drop(memory); }

  std::function<void(int rank, Place place)> on_map;  // called when a rank maps that memory; may throw

 private:
  std::mutex mutex_;
  std::map<char*, std::size_t> shared_;
};

class Ranks {
 public:
  explicit Ranks(int ranks, Engine::Tuning tuning = {.chunk = 16384, .claim = 8192})
      : Ranks(std::vector(static_cast<std::size_t>(ranks), tuning)) {}
  explicit Ranks(const std::vector<Engine::Tuning>& tunings) {
    const auto ranks = static_cast<int>(tunings.size());
    region_memory_ = static_cast<char*>(std::aligned_alloc(128, (Region::size_for(ranks) + 127) / 128 * 128));
    Region region(region_memory_, ranks);
    region.prepare();
    for (int r = 0; r < ranks; ++r)
      engines_.push_back(std::make_unique<Engine>(region, r, tunings[static_cast<std::size_t>(r)], memory_));
  }
  ~Ranks() {
    engines_.clear();
    std::free(region_memory_);
  }
  void run(const std::function<void(int rank, Engine& engine)>& body) {
    std::vector<std::thread> threads;
    for (std::size_t r = 0; r < engines_.size(); ++r)
      threads.emplace_back([&, r] { body(static_cast<int>(r), *engines_[r]); });
    for (auto& thread : threads) thread.join();
  }
  ThreadMemory& memory() { return memory_; }
  Engine& engine(int rank) { return *engines_[static_cast<std::size_t>(rank)]; }

 private:
  ThreadMemory memory_;
  char* region_memory_ = nullptr;
  std::vector<std::unique_ptr<Engine>> engines_;
};

}  // namespace lockstep::shm

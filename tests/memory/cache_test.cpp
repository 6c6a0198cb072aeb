#include <lockstep/memory/cache.h>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include <lockstep/memory/system.h>

#include "support/errors.h"
#include "support/folder.h"

namespace lockstep::memory {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Never destroyed, as in a program.
Cache& fresh_cache() { return *new Cache(*new System); }

// On its own thread, which caches small blocks for this cache.
template <typename Body>
void with_fresh_cache(Body body) {
  std::thread([&] { body(fresh_cache()); }).join();
}

TEST(Cache, aligns_and_keeps_what_is_written) {
  with_fresh_cache([](Cache& cache) {
    std::vector<std::pair<char*, std::size_t>> blocks;
    for (std::size_t bytes = 1; bytes < (std::size_t{8} << 20); bytes += 1 + bytes / 3) {
      auto* memory = static_cast<char*>(cache.allocate(bytes));
      ASSERT_EQ(reinterpret_cast<std::uintptr_t>(memory) % Cache::kAlignment, 0U) << bytes;
      std::memset(memory, static_cast<int>(bytes), bytes);
      blocks.emplace_back(memory, bytes);
    }
    for (const auto& [memory, bytes] : blocks) {
      ASSERT_EQ(memory[0], static_cast<char>(bytes));
      ASSERT_EQ(memory[bytes - 1], static_cast<char>(bytes));
      Cache::free(memory);
    }
    EXPECT_EQ(cache.figures().allocated, 0);
  });
}

TEST(Cache, gives_out_again_what_was_freed) {
  with_fresh_cache([](Cache& cache) {
    for (const std::size_t bytes :
         {std::size_t{10}, std::size_t{5000}, std::size_t{100000}, std::size_t{16} << 20}) {
      void* first = cache.allocate(bytes);
      Cache::free(first);
      EXPECT_EQ(cache.allocate(bytes), first) << bytes;
      Cache::free(first);
    }
    const auto before = cache.figures();
    for (int i = 0; i < 100; ++i) Cache::free(cache.allocate(std::size_t{16} << 20));
    EXPECT_EQ(cache.figures().hits - before.hits, 100);
    EXPECT_EQ(cache.figures().reserved, before.reserved);
    EXPECT_EQ(cache.figures().allocations - before.allocations, 100);
  });
}

TEST(Cache, counts_bytes_in_use_and_the_most_of_them) {
  static Usage usage;  // Of both.
  auto& cache = *new Cache(*new System, &usage);
  auto& other = *new Cache(*new System, &usage);
  void* a = cache.allocate(1000);
  void* b = other.allocate(2'000'000);
  EXPECT_EQ(cache.figures().allocated, 1000);
  EXPECT_EQ(usage.allocated, 2'001'000);
  Cache::free(b);
  EXPECT_EQ(usage.allocated, 1000);
  EXPECT_EQ(usage.peak, 2'001'000);
  usage.reset_peak();
  EXPECT_EQ(usage.peak, 1000);
  Cache::free(a);
  Cache::free(nullptr);
}

TEST(Cache, what_has_long_been_of_no_use_goes_back_to_the_system) {
  with_fresh_cache([](Cache& cache) {
    std::vector<void*> blocks;
    for (int i = 0; i < 20; ++i) blocks.push_back(cache.allocate(std::size_t{20} << 20));
    for (void* block : blocks) Cache::free(block);
    EXPECT_GE(cache.figures().reserved, std::int64_t{400} << 20);
    cache.release_unused();  // Used since the previous call.
    EXPECT_GE(cache.figures().reserved, std::int64_t{400} << 20);
    void* kept = cache.allocate(std::size_t{20} << 20);
    Cache::free(kept);
    cache.release_unused();
    EXPECT_LE(cache.figures().reserved, std::int64_t{64} << 20) << "but for the one that was used";
    cache.release_all();
    EXPECT_EQ(cache.figures().reserved, 0);
  });
}

// Number of the SIZE bytes at FIRST that have pages. The kernel's count for a whole process is only
// approximate, because it is kept per processor.
std::size_t resident(const char* first, std::size_t size) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const auto skipped = (page - reinterpret_cast<std::uintptr_t>(first) % page) % page;
  std::vector<unsigned char> pages((size - skipped) / page);
  EXPECT_EQ(::mincore(const_cast<char*>(first) + skipped, pages.size() * page, pages.data()), 0);
  return page * static_cast<std::size_t>(
                    std::count_if(pages.begin(), pages.end(), [](int bits) { return bits & 1; }));
}

TEST(Cache, pages_go_back_of_a_region_that_is_in_use_in_part) {
  constexpr std::size_t kLarge = std::size_t{24} << 20;
  auto& cache = *new Cache(*new System);
  char* stays = static_cast<char*>(cache.allocate(kLarge));
  char* goes = static_cast<char*>(cache.allocate(kLarge));
  std::memset(stays, 1, kLarge);
  std::memset(goes, 2, kLarge);
  EXPECT_GT(resident(goes, kLarge), kLarge * 3 / 4);
  Cache::free(goes);
  cache.release_all();
  EXPECT_LT(resident(goes, kLarge), kLarge / 4);
  EXPECT_TRUE(std::all_of(stays, stays + kLarge, [](char byte) { return byte == 1; }));
  // And it is given out again.
  char* again = static_cast<char*>(cache.allocate(kLarge));
  std::memset(again, 3, kLarge);
  EXPECT_GT(resident(again, kLarge), kLarge * 3 / 4);
  EXPECT_TRUE(std::all_of(stays, stays + kLarge, [](char byte) { return byte == 1; }));
  Cache::free(again);
  Cache::free(stays);
}

// A day's worth of drifting sizes, compressed: the memory held stays close to the memory needed.
TEST(Cache, does_not_grow_with_sizes_that_change) {
  with_fresh_cache([](Cache& cache) {
    std::minstd_rand random(7);
    std::vector<void*> live;
    std::int64_t most_held = 0, most_used = 0;  // Bytes.
    for (int i = 0; i < 100000; ++i) {
      const double scale = 1 + (i / 1000 % 50);  // Sequences that grow longer, then start over.
      const auto bytes = static_cast<std::size_t>(scale * static_cast<double>(1 + random() % 100000));
      live.push_back(cache.allocate(bytes));
      *static_cast<char*>(live.back()) = 1;
      if (live.size() > 60) {
        std::swap(live[random() % live.size()], live.back());
        Cache::free(live.back());
        live.pop_back();
      }
      if (i % 5000 == 4999) cache.release_unused();  // Time passes.
      most_held = std::max(most_held, cache.figures().reserved);
      most_used = std::max(most_used, cache.figures().allocated);
    }
    for (void* each : live) Cache::free(each);
    EXPECT_LT(most_held, 2 * most_used + (std::int64_t{128} << 20));
  });
}

TEST(Cache, many_threads_allocate_free_for_one_another_and_end) {
  Cache& cache = fresh_cache();
  constexpr int kThreads = 8, kRounds = 30;
  struct Slot {
    std::mutex mutex;
    char* memory = nullptr;
    std::size_t bytes = 0;
  };
  std::array<Slot, 200> slots;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t)
      threads.emplace_back([&, seed = static_cast<unsigned>(round * kThreads + t + 1)] {
        std::minstd_rand random(seed);
        for (int i = 0; i < 500; ++i) {
          auto& slot = slots[random() % slots.size()];
          const std::size_t bytes = random() % 20 == 0 ? 1 + random() % 2'000'000 : 1 + random() % 3000;
          auto* memory = static_cast<char*>(cache.allocate(bytes));
          std::memset(memory, static_cast<int>(bytes), std::min<std::size_t>(bytes, 64));
          memory[bytes - 1] = static_cast<char>(bytes);
          std::lock_guard lock(slot.mutex);
          std::swap(slot.memory, memory);
          const auto old = std::exchange(slot.bytes, bytes);
          if (memory == nullptr) continue;
          ASSERT_EQ(memory[0], static_cast<char>(old));
          ASSERT_EQ(memory[old - 1], static_cast<char>(old));
          Cache::free(memory);
        }
      });
    for (auto& thread : threads) thread.join();
  }
  for (auto& slot : slots) Cache::free(slot.memory);
  EXPECT_EQ(cache.figures().allocated, 0);
  EXPECT_GT(cache.figures().hits, cache.figures().allocations / 2);
}

TEST(Cache, a_thread_that_frees_at_its_very_end_is_in_order) {
  static Cache& cache = fresh_cache();
  struct Late {
    void* memory = nullptr;
    ~Late() {
      Cache::free(memory);
      Cache::free(cache.allocate(100));
    }
  };
  std::thread([] {
    thread_local Late late;  // Created before the thread has blocks, so that it is destroyed after them.
    late.memory = cache.allocate(500);
  }).join();
  EXPECT_EQ(cache.figures().allocated, 0);
}

TEST(Cache, a_child_after_fork_has_memory_of_its_own) {
  Cache& cache = fresh_cache();
  auto* memory = static_cast<char*>(cache.allocate(1'000'000));
  std::memset(memory, 1, 1'000'000);
  std::atomic<bool> stop = false;
  std::thread busy([&] {  // So that a fork finds locks held.
    while (!stop) Cache::free(cache.allocate(200'000));
  });
  for (int i = 0; i < 20; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      std::memset(memory, 2, 1'000'000);
      Cache::free(memory);
      for (int k = 0; k < 100; ++k) Cache::free(cache.allocate(static_cast<std::size_t>(k) * 10'000 + 1));
      ::_exit(0);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    ASSERT_EQ(status, 0);
  }
  stop = true;
  busy.join();
  EXPECT_EQ(memory[999'999], 1);
  Cache::free(memory);
}

// A source of memory shared by a parent and its child: the child sees the parent's changes.
TEST(Cache, a_disowned_one_takes_nothing_back) {
  with_fresh_cache([](Cache& cache) {
    void* memory = cache.allocate(1'000'000);
    cache.disown();
    EXPECT_TRUE(cache.is_disowned());
    Cache::free(memory);
    EXPECT_EQ(cache.figures().allocated, 1'000'000) << "it is the parent's";
    EXPECT_THROW(cache.allocate(100), Error);
  });
}

TEST(Cache, out_of_memory_names_what_is_needed_what_is_held_and_the_limit) {
  const testing::Folder folder;
  folder.write("proc/self/cgroup", "0::/job\n");
  folder.write("proc/self/mountinfo",
               "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n");
  folder.write("sys/fs/cgroup/job/memory.max", "104857600\n");
  folder.write("sys/fs/cgroup/job/memory.current", "10485760\n");
  auto& cache = *new Cache(*new System(folder));
  void* small = cache.allocate(1000);
  EXPECT_THAT(testing::error_of<OutOfMemory>([&] { cache.allocate(std::size_t{200} << 20); }),
              AllOf(HasSubstr("200.0 MiB"), HasSubstr("cgroup's limit is 100.0 MiB"),
                    HasSubstr("90.0 MiB are left"), HasSubstr("1000 B")));
  EXPECT_THROW(cache.allocate(SIZE_MAX - 100), Error);
  Cache::free(small);
  Cache::free(cache.allocate(std::size_t{20} << 20));  // It still works.
}

}  // namespace
}  // namespace lockstep::memory

#include <lockstep/comm/transports/shm/engine/arena.h>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include <lockstep/comm/transports/shm/engine/fork.h>

#include "support/errors.h"

namespace lockstep::shm {
namespace {

TEST(Arena, knows_where_its_memory_is_and_nobody_elses) {
  Arena arena;
  char* memory = static_cast<char*>(arena.allocate(1000));
  const auto place = arena.find(memory, 1000), inside = arena.find(memory + 100, 10);
  ASSERT_NE(place.segment, 0);
  EXPECT_EQ(inside.segment, place.segment);
  EXPECT_EQ(inside.offset, place.offset + 100);
  EXPECT_EQ(arena.segment(place.segment)->data() + place.offset, memory);
  int elsewhere = 0;
  EXPECT_EQ(arena.find(&elsewhere, sizeof elsewhere).segment, 0);
  EXPECT_EQ(arena.find(memory, std::size_t{1} << 30).segment, 0) << "it ends within";
  arena.free(memory);
}

TEST(Arena, aligns) {
  Arena arena;
  for (std::size_t bytes : {0u, 1u, 63u, 65u, 5000u, 1u << 20}) {
    auto address = reinterpret_cast<std::uintptr_t>(arena.allocate(bytes));
    EXPECT_EQ(address % (bytes >= 4096 ? 4096 : 64), 0) << bytes;
  }
}

TEST(Arena, uses_again_what_was_freed) {
  Arena arena;
  for (int i = 0; i < 100; ++i) {
    void* large = arena.allocate(20 << 20);
    void* small = arena.allocate(64);
    arena.free(large);
    arena.free(small);
  }
  EXPECT_LE(arena.figures().segments, 2);
  EXPECT_EQ(arena.figures().used, 0);
}

TEST(Arena, gives_back_what_is_far_more_than_it_uses) {
  Arena arena;
  std::vector<void*> blocks;
  for (int i = 0; i < 10; ++i) blocks.push_back(arena.allocate(50 << 20));
  std::vector<std::uint64_t> segments;
  for (void* block : blocks) segments.push_back(arena.find(block, 1).segment);
  EXPECT_GE(arena.figures().held, std::size_t{500} << 20);
  for (void* block : blocks) arena.free(block);
  EXPECT_LE(arena.figures().held, std::size_t{260} << 20);
  EXPECT_GE(std::count_if(segments.begin(), segments.end(), [&](auto id) { return !arena.segment(id); }), 5);
}

// From several threads; each block must still hold its thread's data when it is freed.
TEST(Arena, gives_nothing_to_two) {
  Arena arena;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::minstd_rand random(static_cast<unsigned>(t + 1));
      std::vector<std::pair<char*, std::size_t>> mine;
      for (int i = 0; i < 3000; ++i) {
        if (mine.size() < 20 && random() % 2 == 0) {
          const std::size_t bytes = random() % (random() % 8 == 0 ? 300000 : 3000) + 1;
          mine.emplace_back(static_cast<char*>(arena.allocate(bytes)), bytes);
          std::memset(mine.back().first, t + 1, bytes);
        } else if (!mine.empty()) {
          std::swap(mine[random() % mine.size()], mine.back());
          const auto [memory, bytes] = mine.back();
          for (std::size_t k = 0; k < bytes; ++k) ASSERT_EQ(memory[k], t + 1);
          arena.free(memory);
          mine.pop_back();
        }
      }
      for (auto [memory, bytes] : mine) arena.free(memory);
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(arena.figures().used, 0);
}

// The kernel is slow with large segments, while other threads' operations look up their memory. A busy
// machine may delay this thread too, but not every time.
TEST(Arena, keeps_nobody_waiting_while_it_takes_memory) {
  using Clock = std::chrono::steady_clock;
  bool waited = true;
  for (int attempt = 0; attempt < 10 && waited; ++attempt) {
    Arena arena;
    void* small = arena.allocate(100);
    void* large = nullptr;
    std::atomic<bool> taken = false;
    const auto began = Clock::now();
    std::thread thread([&] {
      large = arena.allocate(std::size_t{256} << 20);
      taken = true;
    });
    Clock::duration longest{};
    while (!taken) {
      const auto asked = Clock::now();
      EXPECT_NE(arena.find(small, 100).segment, 0);
      longest = std::max(longest, Clock::now() - asked);
    }
    thread.join();
    waited = longest > (Clock::now() - began) / 2;
    arena.free(large);
  }
  EXPECT_FALSE(waited);
}

// What a forked child frees and allocates must not affect its parent.
TEST(Arena, is_left_alone_by_forked_children) {
  Arena& arena = Arena::instance();
  constexpr std::size_t kBytes = std::size_t{300} << 20;  // more than the reserve
  auto* memory = static_cast<char*>(arena.allocate(kBytes));
  auto* small = static_cast<char*>(arena.allocate(1000));
  std::memset(memory, 7, kBytes);
  std::memset(small, 7, 1000);
  const auto before = fork_generation();
  const pid_t child = ::fork();
  if (child == 0) {
    arena.free(memory);
    arena.free(small);
    auto* other = static_cast<char*>(arena.allocate(1000));
    std::memset(other, 9, 1000);
    const bool right = other != small && arena.find(other, 1000).segment != arena.find(small, 1000).segment &&
                       fork_generation() != before && memory[kBytes - 1] == 7;
    ::_exit(right ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(fork_generation(), before);
  for (std::size_t i = 0; i < kBytes; i += 4096) ASSERT_EQ(memory[i], 7);
  for (std::size_t i = 0; i < 1000; ++i) ASSERT_EQ(small[i], 7);
  arena.free(memory);
  arena.free(small);
}

}  // namespace
}  // namespace lockstep::shm

#include <lockstep/memory/heap.h>

#include <random>
#include <set>
#include <vector>

#include <gmock/gmock.h>

namespace lockstep::memory {
namespace {

// Only addresses: no memory is touched.
char* at(std::uintptr_t address) { return reinterpret_cast<char*>(address); }

TEST(Heap, joins_what_is_free_again) {
  Heap heap;
  heap.add({at(1 << 20), 1 << 16});
  std::vector<char*> blocks;
  while (char* block = heap.take(4096, 4096)) blocks.push_back(block);
  EXPECT_EQ(blocks.size(), 16U);
  EXPECT_EQ(heap.used(), heap.held());
  EXPECT_TRUE(heap.free_regions().empty());
  // Every other one, then the rest: one block in the end.
  for (std::size_t i = 0; i < blocks.size(); i += 2) EXPECT_TRUE(heap.put(blocks[i]));
  EXPECT_EQ(heap.take(8192, 4096), nullptr);
  for (std::size_t i = 1; i < blocks.size(); i += 2) EXPECT_TRUE(heap.put(blocks[i]));
  EXPECT_NE(heap.take(1 << 16, 4096), nullptr);
}

TEST(Heap, keeps_regions_apart_that_lie_side_by_side) {
  Heap heap;
  heap.add({at(1 << 20), 4096});
  heap.add({at((1 << 20) + 4096), 4096});
  char* first = heap.take(4096, 64);
  char* second = heap.take(4096, 64);
  EXPECT_EQ(heap.take(64, 64), nullptr);
  heap.put(first);
  heap.put(second);
  EXPECT_EQ(heap.take(8192, 64), nullptr) << "over both";
  ASSERT_EQ(heap.free_regions().size(), 2U);
  heap.remove(heap.free_regions()[0]);
  EXPECT_EQ(heap.held(), 4096U);
}

TEST(Heap, knows_what_it_has_not_given_out) {
  Heap heap;
  heap.add({at(1 << 20), 4096});
  char* block = heap.take(100, 64);
  EXPECT_FALSE(heap.put(block + 64));
  EXPECT_TRUE(heap.put(block));
  EXPECT_FALSE(heap.put(block));
  EXPECT_EQ(heap.used(), 0U);
}

TEST(Heap, blocks_never_overlap_in_a_long_random_run) {
  std::minstd_rand random(1);
  Heap heap;
  for (int i = 0; i < 4; ++i) heap.add({at(static_cast<std::uintptr_t>(i + 1) << 24), 1 << 20});
  std::map<char*, std::size_t> taken;
  for (int i = 0; i < 50000; ++i) {
    if (random() % 2 == 0) {
      const std::size_t bytes = 1 + random() % 50000, unit = random() % 3 == 0 ? 4096 : 64;
      char* block = heap.take(bytes, unit);
      if (block == nullptr) continue;
      ASSERT_EQ(reinterpret_cast<std::uintptr_t>(block) % unit, 0U);
      const auto next = taken.lower_bound(block);
      ASSERT_TRUE(next == taken.end() || block + bytes <= next->first);
      ASSERT_TRUE(next == taken.begin() || std::prev(next)->first + std::prev(next)->second <= block);
      taken[block] = bytes;
    } else if (!taken.empty()) {
      auto each = std::next(taken.begin(), static_cast<std::ptrdiff_t>(random() % taken.size()));
      ASSERT_TRUE(heap.put(each->first));
      taken.erase(each);
    }
  }
  for (const auto& [block, bytes] : taken) heap.put(block);
  EXPECT_EQ(heap.used(), 0U);
  EXPECT_EQ(heap.free_regions().size(), 4U);
}

}  // namespace
}  // namespace lockstep::memory

// Tensors above 2^31 bytes: counts that do not fit into an int.
#include <cstring>
#include <fstream>

#include "support/ranks.h"
#include "support/values.h"

namespace lockstep::testing {
namespace {

constexpr std::int64_t kCount = (std::int64_t{1} << 31) + 4097;  // bytes, and also elements of one byte

std::int64_t available_memory() {
  std::ifstream in("/proc/meminfo");
  for (std::string name, unit; in >> name;) {
    std::int64_t kib = 0;
    in >> kib;
    std::getline(in, unit);
    if (name == "MemAvailable:") return kib << 10;
  }
  return 0;
}

// LibTorch's own comparison takes another byte per element.
bool all_are(const at::Tensor& bytes, std::uint8_t value) {
  if (bytes.is_cuda()) return bytes.eq(value).all().item<bool>();
  const auto* begin = bytes.const_data_ptr<std::uint8_t>();
  return begin[0] == value && std::memcmp(begin, begin + 1, static_cast<std::size_t>(bytes.numel() - 1)) == 0;
}

// Ranks 0 and 1; any other ranks only take part in the decision to run or skip.
TEST(Large, tensors_above_2_gib) {
  LOCKSTEP_NEEDS_RANKS(2);
  on_every_rank([](World& world) {
    // Two ranks' tensors and the engines' staging. All ranks use the same number: memory that another program
    // allocates meanwhile must not make one rank skip while the other waits.
    const auto needed = 6 * kCount;
    const auto available = world.group().all_gather_values(available_memory())[0];
    if (available < needed) {
      if (world.rank() == 0)
        GTEST_SKIP() << "needs " << (needed >> 30) << " GiB of free memory, got " << (available >> 30);
      return;
    }
    if (world.rank() > 1) return;
    auto group = world.size() == 2 ? world.group() : world.group({0, 1});
    auto tensor = at::full({kCount}, 3 + group.rank(), on(at::kByte));
    tensor[kCount - 1] = 9 - group.rank();
    group.all_reduce(tensor).wait();
    EXPECT_EQ(tensor[0].item<int>(), 7);
    EXPECT_EQ(tensor[(std::int64_t{1} << 31) + 5].item<int>(), 7);
    EXPECT_EQ(tensor[kCount - 1].item<int>(), 17);
    EXPECT_TRUE(all_are(tensor.narrow(0, 0, kCount - 1), 7));
    if (group.rank() == 1) tensor.fill_(5);
    group.broadcast(tensor, {.root = 1}).wait();
    EXPECT_TRUE(all_are(tensor, 5));
  });
}

}  // namespace
}  // namespace lockstep::testing

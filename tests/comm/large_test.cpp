// Tensors above 2^31 bytes: counts that do not fit an int.
#include <algorithm>
#include <fstream>

#include "support/ranks.h"
#include "support/values.h"

namespace lockstep::testing {
namespace {

constexpr std::int64_t kCount = (std::int64_t{1} << 31) + 4097;  // bytes, and elements of a byte

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

// LibTorch's own way takes eight bytes an element.
std::int64_t count_of(const at::Tensor& bytes, std::uint8_t value) {
  if (bytes.is_cuda()) return bytes.eq(value).sum().item<std::int64_t>();
  const auto* begin = bytes.const_data_ptr<std::uint8_t>();
  return std::count(begin, begin + bytes.numel(), value);
}

TEST(Large, tensors_above_2_gib) {
  // Two ranks' tensors and what engines stage.
  const auto needed = 6 * kCount;
  if (available_memory() < needed)
    GTEST_SKIP() << "needs " << (needed >> 30) << " GiB of free memory, there are "
                 << (available_memory() >> 30);
  on_every_rank([](World& world) {
    auto group = world.group();
    auto tensor = at::full({kCount}, 3 + group.rank(), on(at::kByte));
    tensor[kCount - 1] = 9 - group.rank();
    group.all_reduce(tensor).wait();
    EXPECT_EQ(tensor[0].item<int>(), 7);
    EXPECT_EQ(tensor[(std::int64_t{1} << 31) + 5].item<int>(), 7);
    EXPECT_EQ(tensor[kCount - 1].item<int>(), 17);
    EXPECT_EQ(count_of(tensor, 7), kCount - 1);
    if (group.rank() == 1) tensor.fill_(5);
    group.broadcast(tensor, {.root = 1}).wait();
    EXPECT_EQ(count_of(tensor, 5), kCount);
  });
}

}  // namespace
}  // namespace lockstep::testing

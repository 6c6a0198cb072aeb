// LibTorch's tensors in Lockstep's memory.
#include <lockstep/comm/cpu_memory.h>

#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <future>
#include <thread>

#include <c10/core/CPUAllocator.h>
#include <lockstep/comm/transports/shm/engine/arena.h>
#include <torch/torch.h>

#include "support/ranks.h"

namespace lockstep::testing {
namespace {

TEST(CpuMemory, a_world_installs_the_allocator_and_tensors_outlive_it) {
  at::Tensor before = at::ones({1000}), inside;
  {
    auto world = World::from_environment();
    ASSERT_TRUE(cpu_memory_stats().installed);
    inside = at::ones({100'000});
  }
  EXPECT_TRUE(use_caching_cpu_allocator());
  EXPECT_EQ(inside.sum().item<float>(), 100'000);
  EXPECT_EQ(before.sum().item<float>(), 1000);
  const auto held = cpu_memory_stats().allocated;
  inside.reset();
  before.reset();  // LibTorch's own memory
  EXPECT_EQ(cpu_memory_stats().allocated, held - 400'000);
}

TEST(CpuMemory, counts_what_tensors_have) {
  use_caching_cpu_allocator();
  reset_peak_cpu_memory_stats();
  const auto before = cpu_memory_stats();
  {
    const auto a = at::empty({1000, 1000}), none = at::empty({0});
    EXPECT_EQ(cpu_memory_stats().allocated, before.allocated + 4'000'000);
  }
  EXPECT_EQ(cpu_memory_stats().allocated, before.allocated);
  EXPECT_GE(cpu_memory_stats().peak, before.allocated + 4'000'000);
  const auto hits = cpu_memory_stats().hits;
  for (int i = 0; i < 10; ++i) at::empty({1000, 1000});
  EXPECT_EQ(cpu_memory_stats().hits, hits + 10);
  empty_cpu_cache();
  EXPECT_LE(cpu_memory_stats().reserved, before.reserved + (std::int64_t{64} << 20));
}

TEST(CpuMemory, tensors_grow_shrink_and_go_from_thread_to_thread) {
  use_caching_cpu_allocator();
  const auto before = cpu_memory_stats().allocated;
  {
    auto tensor = at::arange(10, at::kFloat);
    for (std::int64_t size = 10; size < 3'000'000; size *= 3) {
      tensor.resize_({size});
      ASSERT_EQ(tensor.slice(0, 0, 10).sum().item<float>(), 45);
      tensor.slice(0, 10).fill_(1);
    }
    std::vector<std::future<at::Tensor>> made;
    for (int i = 0; i < 16; ++i)
      made.push_back(std::async(std::launch::async, [i] { return at::full({1 + i * 7000}, i, at::kFloat); }));
    for (int i = 0; i < 16; ++i) {
      const auto each = made[static_cast<std::size_t>(i)].get();
      ASSERT_EQ(each.sum().item<double>(), static_cast<double>(i) * (1 + i * 7000));
    }
  }
  EXPECT_EQ(cpu_memory_stats().allocated, before);
}

TEST(CpuMemory, too_much_is_an_error_that_says_so_and_training_goes_on) {
  use_caching_cpu_allocator();
  EXPECT_THAT(
      error_of<c10::OutOfMemoryError>([] { at::empty({std::int64_t{1} << 50}, at::kByte); }),
      ::testing::AllOf(::testing::HasSubstr("cannot allocate"), ::testing::HasSubstr("reserved in all")));
  EXPECT_EQ(at::ones({1000}).sum().item<float>(), 1000);
}

// Runs its body in the middle of a backward pass.
struct InBackward : torch::autograd::Function<InBackward> {
  static std::function<void()> body;
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x * 1; }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*,
                                               torch::autograd::tensor_list gradients) {
    body();
    return gradients;
  }
};
std::function<void()> InBackward::body;

TEST(CpuMemory, only_what_was_asked_for_in_this_pass_is_shared) {
  use_caching_cpu_allocator();
  const std::size_t bytes = detail::kLeastShared + 4000;
  const auto* sizes = detail::shared_sizes({bytes});
  EXPECT_EQ(sizes, detail::shared_sizes({bytes}));
  const auto elements = static_cast<std::int64_t>(bytes / 4);
  at::Tensor shared, other;
  InBackward::body = [&] {
    detail::share_tensors_of_this_pass(sizes);
    shared = at::ones({elements});
    other = at::ones({elements + 1});
    std::thread([&] { EXPECT_FALSE(detail::in_shared_memory(at::ones({elements}))); }).join();
  };
  InBackward::apply(at::ones({1}).requires_grad_()).sum().backward();
  EXPECT_TRUE(detail::in_shared_memory(shared));
  EXPECT_FALSE(detail::in_shared_memory(other));
  EXPECT_FALSE(detail::in_shared_memory(at::ones({elements}))) << "after the pass";
  InBackward::body = [&] {
    EXPECT_FALSE(detail::in_shared_memory(at::ones({elements}))) << "in another pass";
  };
  InBackward::apply(at::ones({1}).requires_grad_()).sum().backward();
  EXPECT_EQ(cpu_memory_stats().shared_allocated, static_cast<std::int64_t>(bytes));

  // A child has its own memory and leaves alone what it shares with its parent.
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    char go = 0;
    if (::read(ready[0], &go, 1) != 1) ::_exit(2);
    shared.reset();  // the parent has overwritten it meanwhile
    other.fill_(5);
    ::_exit(at::full({elements}, 7, at::kFloat).sum().item<float>() > 0 ? 0 : 1);
  }
  shared.reset();
  empty_cpu_cache();
  auto& arena = shm::Arena::instance();
  void* over = arena.allocate(std::size_t{4} << 20);
  std::memset(over, 255, std::size_t{4} << 20);
  ASSERT_EQ(::write(ready[1], "x", 1), 1);
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  arena.free(over);
  EXPECT_EQ(other.sum().item<float>(), static_cast<float>(elements + 1));
  EXPECT_EQ(cpu_memory_stats().shared_allocated, 0);
}

// Must be the last test: the allocator stays installed.
class OwnAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override { return c10::GetDefaultCPUAllocator()->allocate(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return c10::GetDefaultCPUAllocator()->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

TEST(CpuMemoryOfItsOwn, a_programs_own_allocator_stays) {
  static OwnAllocator own;
  c10::SetCPUAllocator(&own, 10);
  EXPECT_FALSE(use_caching_cpu_allocator());
  EXPECT_FALSE(cpu_memory_stats().installed);
  auto world = World::from_environment();
  EXPECT_EQ(c10::GetCPUAllocator(), &own);
  EXPECT_EQ(at::ones({1000}).sum().item<float>(), 1000);
}

}  // namespace
}  // namespace lockstep::testing

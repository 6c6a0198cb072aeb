// Specific to ranks that share a GPU: the bits of sums, mixtures of memory that peers open and memory that is
// staged, and the order of streams.
#include <chrono>
#include <cstring>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <lockstep/comm/c10d/tensors.h>
#include <lockstep/comm/reduce/reduce.h>

#include "support/ranks.h"
#include "support/values.h"

namespace lockstep::testing {
namespace {

// Which ranks' tensors are in memory that peers open.
enum class Memory { plain, allocated, mixed };
constexpr Memory kMemories[] = {Memory::plain, Memory::allocated, Memory::mixed};

bool is_allocated(Memory memory, int rank) {
  return memory == Memory::allocated || (memory == Memory::mixed && rank % 2 == 0);
}

// The values, in memory of that kind.
at::Tensor placed(Group& group, const at::Tensor& values, Memory memory) {
  auto tensor = is_allocated(memory, group.rank()) ? group.allocate(values.sizes(), values.scalar_type())
                                                   : at::empty(values.sizes(), on(values.scalar_type()));
  return tensor.copy_(values);
}

// Random bits, including denormals, infinities and NaNs of every kind. The same on every rank.
at::Tensor random_bits(int rank, std::int64_t count, at::ScalarType type) {
  const auto size = static_cast<std::int64_t>(c10::elementSize(type));
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(1000 + rank));
  if (type == at::kBool) return at::randint(0, 2, {count}, generator, at::kByte).to(at::kBool);
  return at::randint(0, 256, {count * size}, generator, at::kByte).view(type);
}

at::Tensor expected_sum(int ranks, std::int64_t count, at::ScalarType type, ReduceOp op) {
  if (ranks == 1) return random_bits(0, count, type);  // unchanged
  std::vector<at::Tensor> inputs;
  std::vector<const void*> pointers;
  for (int r = 0; r < ranks; ++r)
    pointers.push_back(inputs.emplace_back(random_bits(r, count, type)).data_ptr());
  auto result = at::empty({count}, type);
  detail::reduce_tree(detail::dtype_of(type), op, pointers, result.data_ptr(),
                      static_cast<std::size_t>(count));
  return result;
}

::testing::AssertionResult same_bits(const at::Tensor& got, const at::Tensor& expected) {
  const auto a = got.cpu().contiguous(), b = expected.cpu().contiguous();
  const auto size = static_cast<std::size_t>(a.element_size());
  const auto *x = static_cast<const char*>(a.const_data_ptr()),
             *y = static_cast<const char*>(b.const_data_ptr());
  for (std::size_t i = 0; i < static_cast<std::size_t>(a.numel()); ++i)
    if (std::memcmp(x + i * size, y + i * size, size) != 0) {
      std::string text = "element " + std::to_string(i) + ":";
      for (const auto* each : {x, y}) {
        text += each == x ? " got " : " expected ";
        for (std::size_t k = size; k-- > 0;)
          text += fmt::format("{:02x}", static_cast<unsigned char>(each[i * size + k]));
      }
      return ::testing::AssertionFailure() << text;
    }
  return ::testing::AssertionSuccess();
}

const std::vector<at::ScalarType> kReduced = {at::kFloat, at::kDouble, at::kBFloat16,    at::kHalf,
                                              at::kChar,  at::kShort,  at::kInt,         at::kLong,
                                              at::kByte,  at::kBool,   at::kComplexFloat};

TEST(CudaIpc, every_reduction_has_the_bits_of_the_cpus) {
  on_every_rank([](World& world) {
    auto group = world.group();
    for (auto type : kReduced)
      for (auto op : kReductions) {
        if (!detail::reducible(detail::dtype_of(type), op)) continue;
        const std::int64_t count = 10'007;
        const auto expected = expected_sum(group.size(), count, type, op);
        for (auto memory : kMemories) {
          SCOPED_TRACE(
              fmt::format("{} of {}, memory {}", name(op), c10::toString(type), static_cast<int>(memory)));
          auto tensor = placed(group, random_bits(group.rank(), count, type), memory);
          group.all_reduce(tensor, {.op = op}).wait();
          EXPECT_TRUE(same_bits(tensor, expected));
        }
      }
  });
}

// Unaligned data is summed number by number.
TEST(CudaIpc, views_that_begin_anywhere) {
  on_every_rank([](World& world) {
    auto group = world.group();
    for (auto type : {at::kFloat, at::kBFloat16, at::kByte})
      for (auto memory : kMemories)
        for (std::int64_t from : {0, 1, 3}) {
          auto whole = placed(group, random_bits(group.rank(), 1003, type), memory);
          const auto before = whole.cpu();
          group.all_reduce(whole.narrow(0, from, 1000)).wait();
          const auto expected = expected_sum(group.size(), 1003, type, ReduceOp::SUM);
          EXPECT_TRUE(same_bits(whole.narrow(0, from, 1000), expected.narrow(0, from, 1000)));
          EXPECT_TRUE(same_bits(whole.narrow(0, 0, from), before.narrow(0, 0, from)));
        }
  });
}

TEST(CudaIpc, every_collective_of_memory_that_peers_open) {
  on_every_rank([](World& world) {
    auto group = world.group();
    const int n = group.size(), me = group.rank();
    for (auto memory : kMemories) {
      auto out = placed(group, at::zeros({n, 5}), memory);
      group.all_gather(out, placed(group, value(me, {5}, at::kFloat), memory)).wait();
      for (int r = 0; r < n; ++r) EXPECT_SAME(out[r], value(r, {5}, at::kFloat));
      // In place: this rank's own row is the input.
      auto rows = placed(group, at::zeros({n, 5}), memory);
      rows[me].copy_(value(me, {5}, at::kFloat));
      group.all_gather(rows, rows[me]).wait();
      EXPECT_SAME(rows, out);

      auto in = placed(group, value(me, {n, 3}, at::kFloat), memory);
      auto part = placed(group, at::zeros({3}), memory);
      group.reduce_scatter(part, in).wait();
      EXPECT_SAME(part, reduced_values(n, {n, 3}, at::kFloat, ReduceOp::SUM)[me]);
      group.reduce_scatter(in[me], in).wait();
      EXPECT_SAME(in[me], part);

      auto to = placed(group, value(me, {n, 2}, at::kFloat), memory),
           from = placed(group, at::zeros({n, 2}), memory);
      group.all_to_all(from, to).wait();
      for (int r = 0; r < n; ++r) EXPECT_SAME(from[r], value(r, {n, 2}, at::kFloat)[me]);

      for (int root = 0; root < n; ++root) {
        auto tensor = placed(group, value(me, {9}, at::kFloat), memory);
        group.reduce(tensor, {.root = root}).wait();
        EXPECT_SAME(tensor, me == root ? reduced_values(n, {9}, at::kFloat, ReduceOp::SUM)
                                       : value(me, {9}, at::kFloat));
        group.broadcast(tensor, {.root = root}).wait();
        EXPECT_SAME(tensor, reduced_values(n, {9}, at::kFloat, ReduceOp::SUM));
      }
    }
  });
}

at::Tensor keep_busy() {
  auto matrix = at::full({3000, 3000}, 1e-4, on());
  for (int i = 0; i < 20; ++i) matrix = matrix.mm(matrix).clamp(0, 1);
  return matrix;
}

// Without waits on the host: earlier work on the stream is seen, and later work does not run too early.
TEST(CudaIpc, streams_keep_the_order) {
  on_every_rank([](World& world) {
    auto group = world.group();
    const int n = group.size(), me = group.rank(), next = (me + 1) % n, previous = (me + n - 1) % n;
    for (auto memory : kMemories)
      for (int round = 0; round < 8; ++round) {
        auto tensor = placed(group, at::zeros({1 << 20}), memory);
        auto message = placed(group, at::zeros({1 << 16}), memory), in = at::zeros({1 << 16}, on());
        keep_busy();
        tensor.fill_(me + 1.0 + round);
        message.fill_(10.0 * me + round);
        auto work = group.all_reduce(tensor);
        work.wait();
        auto sum = tensor.clone();
        tensor.fill_(-1.0);
        if (n > 1) {
          auto received = group.recv(in, {.peer = previous});
          auto sent = group.send(message, {.peer = next});
          received.wait();
          sent.wait();
          message.fill_(-1.0);
        }
        EXPECT_SAME(sum, at::full({1 << 20}, n * (n + 1) / 2.0 + n * round, on(at::kFloat)));
        if (n > 1) EXPECT_SAME(in, at::full({1 << 16}, 10.0 * previous + round, on(at::kFloat)));
      }
  });
}

TEST(CudaIpc, many_under_way_and_memory_used_again) {
  on_every_rank([](World& world) {
    auto group = world.group();
    auto half = group.split(group.rank() % 2);
    for (int round = 0; round < 30; ++round) {
      std::vector<at::Tensor> tensors;
      std::vector<Work> works;
      for (int i = 0; i < 12; ++i) {
        auto& which = i % 3 == 0 ? half : group;
        tensors.push_back(
            placed(group, value(which.rank(), {1 + 7919 * i}, at::kFloat, i), kMemories[i % 2]));
        works.push_back(which.all_reduce(tensors.back()));
      }
      for (auto& work : works) work.wait();
      for (int i = 0; i < 12; ++i)
        EXPECT_SAME(
            tensors[static_cast<std::size_t>(i)],
            reduced_values((i % 3 == 0 ? half : group).size(), {1 + 7919 * i}, at::kFloat, ReduceOp::SUM, i));
    }
  });
}

// With LibTorch's own memory this needs record_stream; here it is enough to free the memory where it was used
// last.
TEST(CudaIpc, tensors_that_are_freed_on_another_stream) {
  on_every_rank([](World& world) {
    auto group = world.group();
    const c10::impl::VirtualGuardImpl cuda(at::kCUDA);
    const auto own = cuda.getStream(test_device());
    const auto other = cuda.getStreamFromGlobalPool(test_device());
    keep_busy();
    own.synchronize();
    auto tensor = group.allocate({1 << 20}).fill_(1.0);
    const auto* memory = tensor.const_data_ptr();
    c10::Event filled(at::kCUDA);
    filled.record(own);
    at::Tensor copy;
    {
      const c10::StreamGuard there(other);
      filled.block(other);
      keep_busy();
      copy = tensor.clone();
      tensor.reset();
    }
    auto next = group.allocate({1 << 20}).fill_(-1.0);
    EXPECT_NE(next.const_data_ptr(), memory);
    other.synchronize();
    EXPECT_SAME(copy, at::ones({1 << 20}, on()));
    group.barrier().wait();
  });
}

// Processes take turns on a GPU, so a rank's work may take many seconds: its peers wait for it.
TEST(CudaIpc, who_leaves_a_group_waits_for_its_device) {
  using Clock = std::chrono::steady_clock;
  on_every_rank([](World& world) {
    auto group = world.group();
    const auto stream = c10::impl::VirtualGuardImpl(at::kCUDA).getStream(test_device());
    auto tensor = at::ones({1000}, on());
    {
      auto going = group.split(0);
      group.barrier().wait();
      if (group.rank() == 0) {
        const auto matrix = at::full({8000, 8000}, 1e-4, on());
        auto product = at::empty_like(matrix);
        auto seconds_of = [&](int times) {
          const auto start = Clock::now();
          for (int i = 0; i < times; ++i) at::mm_out(product, matrix, matrix);
          stream.synchronize();
          return std::chrono::duration<double>(Clock::now() - start).count();
        };
        seconds_of(2);
        const int times = std::min(800, static_cast<int>(3.0 / (seconds_of(5) / 5)) + 1);
        for (int i = 0; i < times; ++i) at::mm_out(product, matrix, matrix);
      }
      going.all_reduce(tensor).wait();
      const bool busy = !stream.query();
      EXPECT_TRUE(busy || group.rank() != 0) << "the queue was not deep enough";
    }
    // Its stream waits for the operation that has just ended.
    const auto until = Clock::now() + std::chrono::milliseconds(200);
    while (!stream.query() && Clock::now() < until) std::this_thread::yield();
    EXPECT_TRUE(stream.query());
    EXPECT_SAME(tensor, at::full({1000}, group.size(), on(at::kFloat)));
    group.barrier().wait();
  });
}

TEST(CudaIpc, a_group_after_one_that_failed) {
  on_every_rank([](World& world) {
    auto group = world.group();
    if (group.size() == 1) return;
    for (int round = 0; round < 3; ++round) {
      {
        auto failing = group.split(0);
        auto tensor = at::ones({failing.rank() == 0 ? 3 : 4}, on());
        EXPECT_THAT(error_of<CommError>([&] { failing.all_reduce(tensor).wait(); }), HasSubstr("[3]"));
      }
      auto next = group.split(0);
      for (auto memory : kMemories) {
        auto tensor = placed(group, value(group.rank(), {1000}, at::kFloat), memory);
        next.all_reduce(tensor).wait();
        EXPECT_SAME(tensor, reduced_values(group.size(), {1000}, at::kFloat, ReduceOp::SUM));
      }
    }
  });
}

TEST(CudaIpc, tensors_of_another_device_are_refused) {
  on_every_rank([](World& world) {
    EXPECT_THAT(error_of<ConfigError>([&] { world.group().all_reduce(at::ones({3})).wait(); }),
                HasSubstr("has no transport for that device"));
    EXPECT_EQ(world.group().backend(at::kCUDA), "cuda_ipc");
    EXPECT_EQ(world.device(), test_device());
  });
}

}  // namespace
}  // namespace lockstep::testing

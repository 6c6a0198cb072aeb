// Ranks whose calls differ: every rank gets an error that names both calls, and no output is written. On
// transports that do not compare calls themselves these run with LOCKSTEP_CHECK=1.
#include <atomic>
#include <thread>

#include "support/eventually.h"
#include "support/ranks.h"
#include "support/values.h"

namespace lockstep::testing {
namespace {

class Mismatch : public ::testing::Test {
 protected:
  void SetUp() override {
    LOCKSTEP_NEEDS_RANKS(2);
    if (!compares_calls())
      GTEST_SKIP() << "transport " << transport() << " compares calls only with LOCKSTEP_CHECK=1";
  }
};

// Rank 1 does `odd` and its peers `even`, on a group made for the test. Returns this rank's error.
using Action = std::function<Work(Group&, at::Tensor)>;
void expect_mismatch(const Action& even, const Action& odd, const std::vector<std::string>& parts,
                     at::Tensor even_tensor = at::ones({10}, on()),
                     at::Tensor odd_tensor = at::ones({10}, on())) {
  on_every_rank([&](World& world) {
    auto group = world.group().split(0, 0, {.name = "mismatch"});
    auto tensor = (group.rank() == 1 ? odd_tensor : even_tensor).clone();
    const auto before = tensor.clone();
    const auto text = error_of<CommError>([&] { (group.rank() == 1 ? odd : even)(group, tensor).wait(); });
    for (const auto& part : parts) EXPECT_THAT(text, HasSubstr(part));
    // Names rank 1 and one of the ranks that differ from it, each with its line.
    EXPECT_THAT(text, AllOf(HasSubstr("rank 1 called"), HasSubstr("group 'mismatch'")));
    EXPECT_THAT(text, ContainsRegex("rank [02-9] called .* at mismatch_test.cpp:[0-9]+"));
    EXPECT_SAME(tensor, before);
    // The group cannot be used any more, and the error gives the reason.
    EXPECT_THAT(error_of<CommError>([&] { group.barrier().wait(); }), HasSubstr("differ in"));
    // The world's group still works.
    world.group().barrier().wait();
  });
}

Work summed(Group& group, at::Tensor tensor) { return group.all_reduce(std::move(tensor)); }
Work broadcast(Group& group, at::Tensor tensor) { return group.broadcast(std::move(tensor)); }

TEST_F(Mismatch, of_operations) {
  expect_mismatch(summed, broadcast,
                  {"operation", "all_reduce(float32 [10], sum)", "broadcast(float32 [10], root 0)"});
}

TEST_F(Mismatch, of_sizes) {
  expect_mismatch(summed, summed, {"size", "[10]", "[20]"}, at::ones({10}, on()), at::ones({20}, on()));
}

// The same number of elements, but the sums would belong to different places.
TEST_F(Mismatch, of_shapes) {
  const auto wide = at::ones({2, 5}, on()), tall = at::ones({5, 2}, on());
  expect_mismatch(summed, summed, {"shape", "[2, 5]", "[5, 2]"}, wide, tall);
  expect_mismatch(broadcast, broadcast, {"shape", "[2, 5]", "[5, 2]"}, wide, tall);
  const auto reduced = [](Group& group, at::Tensor tensor) { return group.reduce(std::move(tensor)); };
  expect_mismatch(reduced, reduced, {"shape", "[10, 1]", "[10]"}, at::ones({10, 1}, on()),
                  at::ones({10}, on()));
  // Too large for a slot.
  expect_mismatch(summed, summed, {"shape"}, at::ones({300, 200}, on()), at::ones({200, 300}, on()));
}

// Equal bytes: PyTorch returns garbage here with exit status 0.
TEST_F(Mismatch, of_dtypes_of_one_size) {
  expect_mismatch(summed, summed, {"dtype", "float32", "int32"}, at::ones({10}, on()),
                  at::ones({10}, on(at::kInt)));
}

TEST_F(Mismatch, of_reductions) {
  expect_mismatch(
      summed, [](Group& group, at::Tensor tensor) { return group.all_reduce(tensor, {.op = ReduceOp::MAX}); },
      {"reduction", "sum", "max"});
}

TEST_F(Mismatch, of_roots) {
  expect_mismatch(broadcast,
                  [](Group& group, at::Tensor tensor) { return group.broadcast(tensor, {.root = 1}); },
                  {"root", "root 0", "root 1"});
}

TEST_F(Mismatch, of_tags) {
  expect_mismatch(summed,
                  [](Group& group, at::Tensor tensor) { return group.all_reduce(tensor, {.tag = "other"}); },
                  {"tag", "other"});
}

TEST_F(Mismatch, of_splits) {
  on_every_rank([](World& world) {
    auto group = world.group().split(0, 0, {.name = "splits"});
    const auto n = static_cast<std::size_t>(group.size());
    // Rank 1 sends one row too many to rank 0, which does not expect it.
    std::vector<std::int64_t> to(n, 1), from(n, 1);
    if (group.rank() == 1) to[0] = 2;
    auto out = at::zeros({static_cast<std::int64_t>(n)}, on());
    auto in = at::ones({static_cast<std::int64_t>(n) + (group.rank() == 1)}, on());
    EXPECT_THAT(
        error_of<CommError>([&] { group.all_to_all(out, in, {.out_splits = from, .in_splits = to}).wait(); }),
        AllOf(HasSubstr("rank 1 gives rank 0 2 elements"), HasSubstr("expects 1")));
    EXPECT_SAME(out, at::zeros({static_cast<std::int64_t>(n)}, on()));
  });
}

TEST_F(Mismatch, of_gathered_sizes) {
  on_every_rank([](World& world) {
    auto group = world.group().split(0, 0, {.name = "gathered"});
    std::vector<at::Tensor> out;
    for (int r = 0; r < group.size() && group.rank() == 0; ++r) out.push_back(at::zeros({2}, on()));
    const auto text =
        error_of<CommError>([&] { group.gather(out, at::ones({group.rank() == 1 ? 3 : 2}, on())).wait(); });
    EXPECT_THAT(text, HasSubstr("rank 1 gives rank 0 3 elements"));
    for (auto& tensor : out) EXPECT_SAME(tensor, at::zeros({2}, on()));
  });
}

// Each rank waits in the group that the other one uses second. Only the deadline can end that, and the error
// shows where each rank waited.
TEST_F(Mismatch, of_the_order_of_groups) {
  std::atomic<int> begun = 0;  // counted for ranks that are threads
  on_every_rank([&](World& world) {
    if (world.rank() > 1) return;
    auto first = world.group({0, 1}, {.name = "first"});
    auto second = world.group({0, 1}, {.name = "second"});
    auto& mine = world.rank() == 0 ? first : second;
    const auto text = error_of<CommError>([&] {
      auto work = mine.all_reduce(at::ones({3}, on()), {.timeout = std::chrono::milliseconds(300)});
      ++begun;
      // The error names the other rank's call, so that call must come first.
      EXPECT_TRUE(!ranks_are_threads() || eventually([&] { return begun == 2; }));
      work.wait();
    });
    EXPECT_THAT(text, HasSubstr("group '" + mine.name() + "'"));
    EXPECT_THAT(text, HasSubstr("mismatch_test.cpp:"));
    if (by_nccls_rules())
      EXPECT_THAT(text,
                  HasSubstr(world.rank() == 0 ? "rank 1 has not reached the first operation of the group"
                                              : "rank 0 has not reached the first operation of the group"));
    else if (ranks_are_threads() && world.rank() == 0) {
      EXPECT_THAT(text, AnyOf(HasSubstr("rank 1 has not arrived: its last call is #0 on group 'second'"),
                              HasSubstr("has left")));
    }
  });
}

TEST_F(Mismatch, of_the_order_of_ranks) {
  on_every_rank([](World& world) {
    if (world.rank() > 1) return;
    const std::vector<int> mine = world.rank() == 0 ? std::vector{0, 1} : std::vector{1, 0};
    EXPECT_THAT(error_of<ConfigError>([&] { (void)world.group(mine); }),
                AllOf(HasSubstr("[0, 1]"), HasSubstr("[1, 0]")));
  });
}

}  // namespace
}  // namespace lockstep::testing

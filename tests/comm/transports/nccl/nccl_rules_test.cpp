// Consequences of NCCL's rules, for transports that follow them: NCCL with several GPUs, or fake_nccl.
#include <atomic>
#include <chrono>
#include <thread>

#include <lockstep/comm/group/connect_barrier.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "support/ranks.h"
#include "support/values.h"

namespace lockstep::testing {
namespace {

using Clock = std::chrono::steady_clock;
using detail::ConnectBarrier;
using detail::NotMet;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr auto kUntold = [](bool) {};
constexpr auto kGoesOn = [] { return false; };

class NcclRules : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!by_nccls_rules())
      GTEST_SKIP() << "transport " << transport()
                   << " does not follow NCCL's rules; run with --transport=fake_nccl --ranks=3";
    LOCKSTEP_NEEDS_RANKS(2);
  }
};

TEST_F(NcclRules, a_first_operation_names_who_is_missing_and_the_latecomer_does_not_enter_alone) {
  on_every_rank([](World& world) {
    if (world.rank() > 1) return;
    auto pair = world.group({0, 1}, {.name = "pair"});
    auto after = world.group({0, 1});
    if (world.rank() == 1) after.barrier().wait();
    const milliseconds timeout(world.rank() == 0 ? 200 : 60000);
    const auto text =
        error_of<CommError>([&] { pair.all_reduce(at::ones({3}, on()), {.timeout = timeout}).wait(); });
    EXPECT_THAT(text, HasSubstr(world.rank() == 0 ? "rank 1 has not reached the first operation of the group"
                                                  : "all ranks reached the first operation of the group, but "
                                                    "rank 0 gave up before"));
    EXPECT_THAT(text, HasSubstr("group 'pair'"));
    if (world.rank() == 0) after.barrier().wait();
  });
}

TEST_F(NcclRules, a_first_operation_may_be_one_that_some_have_no_part_in) {
  on_every_rank([](World& world) {
    if (world.rank() > 1) return;
    auto pair = world.group({0, 1});
    std::vector<at::Tensor> out;
    if (world.rank() == 0) out = {at::zeros({2}, on()), at::zeros({0}, on())};
    pair.gather(out, at::full({world.rank() == 0 ? 2 : 0}, 7.0, on())).wait();
    if (world.rank() == 0) EXPECT_SAME(out[0], at::full({2}, 7.0, on()));
    auto sum = at::ones({2}, on());
    pair.all_reduce(sum).wait();
    EXPECT_SAME(sum, at::full({2}, 2.0, on()));
  });
}

// Inside a call, in an existing communicator.
TEST_F(NcclRules, a_call_that_waits_inside_the_engine_ends_at_its_deadline) {
  on_every_rank([](World& world) {
    if (world.rank() > 1) return;
    auto pair = world.group({0, 1});
    pair.barrier().wait();
    if (world.rank() == 1) return world.group({0, 1}).barrier().wait();
    std::vector<at::Tensor> out = {at::zeros({2}, on()), at::zeros({2}, on())};
    const auto begin = Clock::now();
    EXPECT_THAT(error_of<CommError>(
                    [&] { pair.gather(out, at::ones({2}, on()), {.timeout = milliseconds(200)}).wait(); }),
                AllOf(HasSubstr("gather #1"), HasSubstr("did not complete"), HasSubstr("its deadline")));
    EXPECT_LT(Clock::now() - begin, seconds(60)) << "the group's timeout is 3 minutes";
    world.group({0, 1}).barrier().wait();
  });
}

TEST_F(NcclRules, who_waits_for_the_first_message_of_two_holds_nobody_else_up) {
  on_every_rank([](World& world) {
    if (world.rank() > 1) return;
    auto pair = world.group({0, 1});
    auto flag = at::zeros({1}, on());
    std::thread listener;
    if (world.rank() == 0) listener = std::thread([&] { pair.recv(flag, {.peer = 1}).wait(); });
    std::this_thread::sleep_for(milliseconds(50));
    for (int i = 0; i < 3; ++i) {
      std::vector<at::Tensor> out;
      if (world.rank() == 0) out = {at::zeros({2}, on()), at::zeros({2}, on())};
      pair.gather(out, at::full({2}, world.rank() + 1.0, on())).wait();
      if (world.rank() == 0) EXPECT_SAME(out[1], at::full({2}, 2.0, on()));
    }
    if (world.rank() == 1) return pair.send(at::ones({1}, on()), {.peer = 0}).wait();
    listener.join();
    EXPECT_EQ(flag.item<float>(), 1);
  });
}

TEST_F(NcclRules, a_groups_failure_ends_the_wait_for_a_first_message) {
  on_every_rank([](World& world) {
    if (world.rank() > 1) return;
    auto pair = world.group({0, 1});
    pair.barrier().wait();
    if (world.rank() == 1) return world.group({0, 1}).barrier().wait();
    std::string text;
    std::thread listener([&] {
      auto flag = at::zeros({1}, on());
      text = error_of<CommError>([&] { pair.recv(flag, {.peer = 1}).wait(); });
    });
    std::this_thread::sleep_for(milliseconds(100));
    const auto begin = Clock::now();
    EXPECT_THROW(pair.all_reduce(at::ones({2}, on()), {.timeout = milliseconds(200)}).wait(), CommError);
    listener.join();
    EXPECT_LT(Clock::now() - begin, seconds(60)) << "the group's timeout is 3 minutes";
    EXPECT_THAT(text, HasSubstr("all_reduce #1"));
    world.group({0, 1}).barrier().wait();
  });
}

// Each rank has a thread that sends to the next rank and a thread that receives from the previous one: all
// are first messages, in no particular order.
TEST_F(NcclRules, first_messages_of_several_threads_do_not_keep_one_another_waiting) {
  on_every_rank([](World& world) {
    for (int round = 0; round < 5; ++round) {
      auto group = world.group().split(0);
      const int n = group.size(), next = (group.rank() + 1) % n, previous = (group.rank() + n - 1) % n;
      auto in = at::zeros({3}, on());
      std::thread sender([&] { group.send(at::full({3}, group.rank() + 1.0, on()), {.peer = next}).wait(); });
      group.recv(in, {.peer = previous}).wait();
      sender.join();
      EXPECT_SAME(in, at::full({3}, previous + 1.0, on()));
    }
  });
}

TEST_F(NcclRules, an_empty_message_is_not_the_first_one) {
  on_every_rank([](World& world) {
    if (world.rank() > 1) return;
    auto pair = world.group({0, 1});
    auto nothing = at::zeros({0}, on());
    const PeerOptions other{.peer = 1 - world.rank()}, hasty{.peer = 1, .timeout = milliseconds(200)};
    if (world.rank() == 1) {
      pair.recv(nothing, other).wait();
      return world.group({0, 1}).barrier().wait();
    }
    pair.send(nothing, other).wait();
    EXPECT_THAT(error_of<CommError>([&] { pair.send(at::ones({1}, on()), hasty).wait(); }),
                HasSubstr("rank 1 has not reached the first message between these ranks"));
    world.group({0, 1}).barrier().wait();
  });
}

// The same with the barrier alone, without groups.
TEST(ConnectBarrier, all_enter_or_none) {
  for (int round = 0; round < 40; ++round) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::atomic<int> entered = 0, turned_away = 0;
    std::vector<std::thread> ranks;
    for (int r = 0; r < 3; ++r)
      ranks.emplace_back([&, r] {
        ConnectBarrier meeting(store, r, 3);
        if (r == 2) std::this_thread::sleep_for(milliseconds(round % 8));
        try {
          EXPECT_TRUE(meeting.await({}, milliseconds(r == 0 ? 4 : 2000), kUntold, kGoesOn));
          EXPECT_FALSE(meeting.await({}, milliseconds(1), kUntold, kGoesOn));
          ++entered;
        } catch (const NotMet&) {
          ++turned_away;
        }
      });
    for (auto& rank : ranks) rank.join();
    EXPECT_TRUE(entered == 3 || turned_away == 3) << entered << " of 3 entered";
  }
}

TEST(ConnectBarrier, pairs_meet_by_themselves_and_a_stop_ends_the_wait) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ConnectBarrier a(store, 0, 3), b(store, 1, 3);
  std::thread other([&] { EXPECT_TRUE(b.await(0, seconds(60), kUntold, kGoesOn)); });
  std::vector<bool> told;
  EXPECT_TRUE(a.await(1, seconds(60), [&](bool waits) { told.push_back(waits); }, kGoesOn));
  other.join();
  EXPECT_EQ(told, (std::vector{true, false}));
  const auto begin = Clock::now();
  EXPECT_THAT(error_of<NotMet>([&] {
                a.await(2, seconds(120), kUntold, [&] { return Clock::now() - begin > milliseconds(20); });
              }),
              HasSubstr("rank 2 has not reached the first message between these ranks"));
  EXPECT_LT(Clock::now() - begin, seconds(60));
  EXPECT_FALSE(ConnectBarrier(store, 0, 1).await({}, milliseconds(1), kUntold, kGoesOn));
}

}  // namespace
}  // namespace lockstep::testing

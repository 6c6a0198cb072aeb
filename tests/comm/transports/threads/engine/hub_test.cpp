// The hub of ranks that are threads, without LibTorch, so that the sanitizers can run it.
#include <lockstep/comm/transports/threads/engine/hub.h>

#include <condition_variable>
#include <future>
#include <random>
#include <thread>

#include <lockstep/base/error.h>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

using detail::Hub;
using detail::Op;
using detail::Whereabouts;

// Waits for `done` and keeps its arguments.
class Ticket {
 public:
  std::function<void(std::exception_ptr, int)> receiver() {
    return [promise = promise_](const std::exception_ptr& error, int source) {
      if (error)
        promise->set_exception(error);
      else
        promise->set_value(source);
    };
  }
  int wait() { return future_.get(); }
  bool pending() { return future_.wait_for(std::chrono::seconds(0)) != std::future_status::ready; }

 private:
  std::shared_ptr<std::promise<int>> promise_ = std::make_shared<std::promise<int>>();
  std::future<int> future_ = promise_->get_future();
};

std::shared_ptr<Hub> make_hub(int ranks) {
  std::vector<int> all;
  for (int r = 0; r < ranks; ++r) all.push_back(r);
  return std::make_shared<Hub>(all, std::make_shared<Whereabouts>(ranks));
}

Op part_of(Operation operation, int rank, int ranks, std::uint64_t sequence, std::vector<float>& data,
           Ticket& ticket) {
  Op op;
  op.call.operation = operation;
  op.call.dtype = Dtype::float32;
  op.call.rank = rank;
  op.call.size = ranks;
  op.call.sequence = sequence;
  op.call.count = static_cast<std::int64_t>(data.size());
  op.call.shape = {op.call.count};
  op.call.group = "test";
  if (detail::rooted(operation)) op.call.root = 0;
  op.outputs = {data.data()};
  op.inputs = {data.data()};
  op.item_size = sizeof(float);
  op.done = ticket.receiver();
  return op;
}

TEST(Hub, ranks_as_threads_sum_over_many_rounds) {
  constexpr int kRanks = 4, kRounds = 200;
  auto hub = make_hub(kRanks);
  std::vector<std::thread> threads;
  for (int r = 0; r < kRanks; ++r)
    threads.emplace_back([&, r] {
      std::mt19937 random(static_cast<unsigned>(r));
      for (int round = 0; round < kRounds; ++round) {
        // Several in flight at once, waited for in any order.
        std::vector<std::vector<float>> data;
        std::vector<Ticket> tickets(3);
        for (int i = 0; i < 3; ++i) data.emplace_back(100, static_cast<float>(r + 1));
        for (std::size_t i = 0; i < 3; ++i) {
          if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
          hub->post(r, part_of(Operation::all_reduce, r, kRanks, static_cast<std::uint64_t>(round) * 3 + i,
                               data[i], tickets[i]));
        }
        for (std::size_t i : {2, 0, 1}) {
          tickets[i].wait();
          ASSERT_EQ(data[i], std::vector<float>(100, 10));
        }
      }
    });
  for (auto& thread : threads) thread.join();
}

TEST(Hub, messages_pair_by_tag_in_order) {
  auto hub = make_hub(2);
  std::vector<float> one{1}, two{2}, other{3}, in_a{0}, in_b{0}, in_c{0};
  auto message = [](Operation operation, int rank, int peer, std::vector<float>& data, Ticket& ticket) {
    auto op = part_of(operation, rank, 2, 0, data, ticket);
    op.call.root = peer;
    return op;
  };
  Ticket sent[3], received[3];
  hub->post_point_to_point(0, 5, message(Operation::send, 0, 1, one, sent[0]));
  hub->post_point_to_point(0, 5, message(Operation::send, 0, 1, two, sent[1]));
  hub->post_point_to_point(0, 6, message(Operation::send, 0, 1, other, sent[2]));
  hub->post_point_to_point(1, 6, message(Operation::recv, 1, 0, in_c, received[2]));
  hub->post_point_to_point(1, 5, message(Operation::recv, 1, detail::kAnySource, in_a, received[0]));
  hub->post_point_to_point(1, 5, message(Operation::recv, 1, 0, in_b, received[1]));
  for (auto& ticket : sent) ticket.wait();
  for (auto& ticket : received) EXPECT_EQ(ticket.wait(), 0);
  EXPECT_EQ(in_a[0], 1);
  EXPECT_EQ(in_b[0], 2);
  EXPECT_EQ(in_c[0], 3);
}

TEST(Hub, a_mismatch_reaches_every_rank_and_writes_nothing) {
  auto hub = make_hub(3);
  std::vector<std::vector<float>> data(3, std::vector<float>(4, 1));
  Ticket tickets[3];
  hub->post(0, part_of(Operation::all_reduce, 0, 3, 0, data[0], tickets[0]));
  // fails before rank 2 has arrived
  hub->post(1, part_of(Operation::broadcast, 1, 3, 0, data[1], tickets[1]));
  EXPECT_FALSE(tickets[0].pending());
  hub->post(2, part_of(Operation::all_reduce, 2, 3, 0, data[2], tickets[2]));
  for (auto& ticket : tickets)
    EXPECT_THAT(error_of<Error>([&] { ticket.wait(); }),
                AllOf(HasSubstr("all_reduce("), HasSubstr("broadcast(")));
  for (auto& each : data) EXPECT_EQ(each, std::vector<float>(4, 1));
}

TEST(Hub, messages_of_different_sizes_fail_on_both_sides) {
  auto hub = make_hub(2);
  std::vector<float> out(3), in(4);
  Ticket sent, received;
  auto send = part_of(Operation::send, 0, 2, 0, out, sent),
       recv = part_of(Operation::recv, 1, 2, 0, in, received);
  send.call.root = 1;
  recv.call.root = 0;
  hub->post_point_to_point(0, 0, std::move(send));
  hub->post_point_to_point(1, 0, std::move(recv));
  EXPECT_THAT(error_of<Error>([&] { sent.wait(); }), HasSubstr("size"));
  EXPECT_THAT(error_of<Error>([&] { received.wait(); }), HasSubstr("size"));
}

TEST(Hub, poison_wakes_those_who_wait_and_those_who_come) {
  auto hub = make_hub(2);
  std::vector<float> data(1);
  Ticket waiting, late;
  hub->post(0, part_of(Operation::all_reduce, 0, 2, 0, data, waiting));
  hub->poison("rank 1 died");
  hub->poison("something later");
  EXPECT_THAT(error_of<Error>([&] { waiting.wait(); }), HasSubstr("rank 1 died"));
  hub->post(1, part_of(Operation::all_reduce, 1, 2, 0, data, late));
  EXPECT_THAT(error_of<Error>([&] { late.wait(); }), HasSubstr("rank 1 died"));
}

TEST(Hub, who_waits_for_a_rank_that_left_is_told) {
  auto hub = make_hub(2);
  std::vector<float> data(1);
  Ticket before, after;
  hub->post(0, part_of(Operation::all_reduce, 0, 2, 0, data, before));
  hub->leave(1);
  EXPECT_THAT(error_of<Error>([&] { before.wait(); }), HasSubstr("rank 1 has left"));

  auto second = make_hub(2);
  second->leave(1);
  second->post(0, part_of(Operation::all_reduce, 0, 2, 0, data, after));
  EXPECT_THAT(error_of<Error>([&] { after.wait(); }), HasSubstr("rank 1 has left"));
}

TEST(Hub, the_absent_are_named_with_where_they_are) {
  auto hub = make_hub(3);
  std::vector<float> data(1);
  Ticket tickets[4];
  for (int r = 0; r < 3; ++r) hub->post(r, part_of(Operation::barrier, r, 3, 0, data, tickets[r]));
  hub->post(0, part_of(Operation::all_reduce, 0, 3, 1, data, tickets[3]));
  const auto text = hub->absent(1);
  EXPECT_THAT(text, AllOf(HasSubstr("rank 1 has not arrived"), HasSubstr("rank 2 has not arrived"),
                          HasSubstr("barrier"), Not(HasSubstr("rank 0 has not"))));
  hub->poison("end");
  EXPECT_EQ(hub->absent(1), "end");
}

}  // namespace
}  // namespace lockstep::testing

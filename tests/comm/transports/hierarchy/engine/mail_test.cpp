// Sends and receives of groups that span hosts, with ranks as threads.
#include <lockstep/comm/transports/hierarchy/engine/mail.h>

#include <atomic>
#include <future>
#include <random>

#include <fmt/format.h>

#include "comm/transports/hierarchy/engine/threads.h"
#include "support/errors.h"

namespace lockstep::hierarchy {
namespace {

using detail::kAnySource;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::AllOf;
using testing::error_of;
using testing::HasSubstr;

// A message in flight, and its outcome.
class Message {
 public:
  Message(Mail& mail, Operation operation, int rank, int peer, std::vector<float>& data, int tag,
          milliseconds timeout = seconds(60), Dtype dtype = Dtype::float32)
      : mail_(mail) {
    Op op;
    op.call.operation = operation;
    op.call.dtype = dtype;
    op.call.rank = rank;
    op.call.root = peer;
    op.call.size = 8;
    op.call.count = static_cast<std::int64_t>(data.size());
    op.call.bytes = op.call.count * 4;
    op.call.shape = {op.call.count};
    op.call.group = "test";
    op.call.far_site = fmt::format("test.cpp:{}", rank);
    op.item_size = 4;
    data.reserve(1);
    if (operation == Operation::send)
      op.inputs = {data.data()};
    else
      op.outputs = {data.data()};
    op.done = [this](const std::exception_ptr& error, int source) {
      if (ended_.exchange(true)) ADD_FAILURE() << "it ended twice";
      source_ = source;
      if (error)
        outcome_.set_exception(error);
      else
        outcome_.set_value();
    };
    item_ = mail.post(std::move(op), tag, timeout);
  }
  int wait() {
    mail_.wait(*item_, Clock::now() + seconds(60));
    outcome_.get_future().get();
    return source_;
  }

 private:
  Mail& mail_;
  Mail::ItemPtr item_;
  std::promise<void> outcome_;
  std::atomic<bool> ended_ = false;
  int source_ = -1;
};

std::vector<float> numbers(int from, int to, int tag) {
  return std::vector<float>(static_cast<std::size_t>(1 + (from * 7 + to * 3 + tag) % 50),
                            static_cast<float>(from * 10000 + to * 100 + tag));
}

TEST(Mail, goes_to_every_rank_in_any_order_of_tags) {
  for (const auto& nodes : {std::vector{0, 0, 1, 1}, {0, 1}, {0, 0, 1}, {0, 1, 2, 0, 1}}) {
    HostRanks ranks(nodes);
    const int p = static_cast<int>(nodes.size());
    ranks.run([&](int rank, Engine&) {
      std::vector<std::vector<float>> kept;
      kept.reserve(static_cast<std::size_t>(100 * p));
      std::vector<std::unique_ptr<Message>> sends, receives;
      std::vector<std::pair<int, int>> from;
      for (int tag = 0; tag < 10; ++tag)
        for (int peer = 0; peer < p; ++peer)
          if (peer != rank)
            sends.push_back(std::make_unique<Message>(ranks.mail(rank), Operation::send, rank, peer,
                                                      kept.emplace_back(numbers(rank, peer, tag)), tag));
      const auto first = kept.size();
      for (int tag = 9; tag >= 0; --tag)
        for (int peer = 0; peer < p; ++peer)
          if (peer != rank) {
            from.emplace_back(peer, tag);
            receives.push_back(std::make_unique<Message>(ranks.mail(rank), Operation::recv, rank, peer,
                                                         kept.emplace_back(numbers(peer, rank, tag).size()),
                                                         tag));
          }
      for (std::size_t i = 0; i < receives.size(); ++i) {
        EXPECT_EQ(receives[i]->wait(), from[i].first);
        EXPECT_EQ(kept[first + i], numbers(from[i].first, rank, from[i].second));
      }
      for (auto& each : sends) each->wait();
    });
  }
}

TEST(Mail, from_any_rank_comes_once_from_near_and_far) {
  constexpr int kEach = 60;
  for (const auto& nodes : {std::vector{0, 0, 1, 1}, {0, 1, 1}, {0, 0, 1}}) {
    HostRanks ranks(nodes);
    const int p = static_cast<int>(nodes.size());
    ranks.run([&](int rank, Engine&) {
      std::minstd_rand random(static_cast<unsigned>(rank + 1));
      if (rank != 0) {
        for (int i = 0; i < kEach; ++i) {
          std::vector<float> data(4, static_cast<float>(1000 * rank + i));
          if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
          Message(ranks.mail(rank), Operation::send, rank, 0, data, 3).wait();
        }
        return;
      }
      std::vector<int> next(static_cast<std::size_t>(p), 0);
      std::vector<std::vector<float>> data(static_cast<std::size_t>((p - 1) * kEach), std::vector<float>(4));
      std::vector<std::unique_ptr<Message>> receives;
      // Some are posted ahead, some one at a time.
      for (std::size_t i = 0; i < data.size();) {
        receives.clear();
        const auto many = std::min<std::size_t>(1 + random() % 5, data.size() - i);
        for (std::size_t n = 0; n < many; ++n)
          receives.push_back(
              std::make_unique<Message>(ranks.mail(0), Operation::recv, 0, kAnySource, data[i + n], 3));
        std::vector<std::pair<int, float>> got;
        for (std::size_t n = 0; n < many; ++n) {
          const int source = receives[n]->wait();
          ASSERT_GT(source, 0);
          ASSERT_LT(source, p);
          got.emplace_back(source, data[i + n][0]);
        }
        for (auto [source, value] : got)
          EXPECT_EQ(static_cast<int>(value), 1000 * source + next[static_cast<std::size_t>(source)]++);
        i += many;
      }
      for (int r = 1; r < p; ++r) EXPECT_EQ(next[static_cast<std::size_t>(r)], kEach);
    });
  }
}

TEST(Mail, that_does_not_fit_is_an_error_at_both_ends) {
  for (const auto& nodes : {std::vector{0, 1}, {0, 0}}) {
    for (auto dtype : {Dtype::float32, Dtype::int32}) {
      HostRanks ranks({nodes[0], nodes[1], 2});
      const auto count = dtype == Dtype::float32 ? 5u : 3u;
      ranks.run([&](int rank, Engine&) {
        if (rank > 1) return;
        std::vector<float> data(rank == 0 ? 3 : count, 7);
        const auto before = data;
        const auto text = error_of<shm::Mismatch>([&] {
          if (rank == 0)
            Message(ranks.mail(0), Operation::send, 0, 1, data, 1).wait();
          else
            Message(ranks.mail(1), Operation::recv, 1, 0, data, 1, seconds(60), dtype).wait();
        });
        EXPECT_THAT(text, AllOf(HasSubstr("rank 0 called send"), HasSubstr("rank 1 called recv"),
                                HasSubstr("test.cpp:0"), HasSubstr("test.cpp:1")));
        EXPECT_EQ(data, before);
      });
    }
  }
}

TEST(Mail, that_nobody_sends_ends_at_its_deadline_or_when_it_is_told) {
  for (int peer : {1, 2, kAnySource})
    for (bool told : {false, true}) {
      HostRanks ranks({0, 0, 1});
      std::vector<float> data(3);
      std::thread teller;
      if (told)
        teller = std::thread([&] {
          std::this_thread::sleep_for(milliseconds(30));
          ranks.mail(0).interrupt("enough");
        });
      const auto begin = Clock::now();
      auto receive = [&] {
        Message(ranks.mail(0), Operation::recv, 0, peer, data, 1,
                told ? milliseconds(120000) : milliseconds(80))
            .wait();
      };
      if (told)
        EXPECT_THAT(error_of<shm::Interrupted>(receive), HasSubstr("enough"));
      else
        EXPECT_THAT(error_of<shm::TimedOut>(receive), HasSubstr("deadline"));
      EXPECT_LT(Clock::now() - begin, seconds(60))
          << "a rank that learns of the failure must not wait for the timeout of 120 s";
      if (teller.joinable()) teller.join();
      // Later messages fail too, with the reason.
      EXPECT_THROW(Message(ranks.mail(0), Operation::recv, 0, peer, data, 1).wait(), std::exception);
    }
}

}  // namespace
}  // namespace lockstep::hierarchy

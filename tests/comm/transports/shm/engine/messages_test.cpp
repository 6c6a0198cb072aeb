// Sends and receives: how they end, and what they cost waiting threads.
#include <lockstep/comm/transports/shm/engine/messages.h>

#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <thread>

#include <lockstep/control/agent/process.h>

#include "comm/transports/shm/engine/processes.h"
#include "comm/transports/shm/engine/threads.h"
#include "support/errors.h"

namespace lockstep::shm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

// A message of this many bytes in flight.
struct Letter {
  std::vector<char> data;
  std::shared_ptr<std::promise<std::string>> ended = std::make_shared<std::promise<std::string>>();
  Messages::ItemPtr item = nullptr;

  void post(Messages& messages, lockstep::Operation operation, int rank, int peer, int tag) {
    Op op;
    op.call.operation = operation;
    op.call.dtype = Dtype::uint8;
    op.call.rank = rank;
    op.call.root = peer;
    op.call.size = 2;
    op.call.count = op.call.bytes = static_cast<std::int64_t>(data.size());
    op.call.shape = {op.call.count};
    op.item_size = 1;
    if (operation == lockstep::Operation::send)
      op.inputs = {data.data()};
    else
      op.outputs = {data.data()};
    op.done = [ended = ended](const std::exception_ptr& error, int) {
      std::string text;
      try {
        if (error) std::rethrow_exception(error);
      } catch (const std::exception& problem) {
        text = problem.what();
      }
      ended->set_value(text);
    };
    item = messages.post(std::move(op), peer, tag, seconds(60));
  }
  std::string end(Messages& messages) {
    messages.wait(*item, Clock::now() + seconds(60));
    return ended->get_future().get();
  }
};

// Its last notes acknowledge the messages. They must reach the sender even if it is slow to look.
TEST(Messages, a_receiver_may_leave_when_it_has_all) {
  constexpr int kMessages = 50;
  Processes processes(2, [](Member& member) {
    std::vector<Letter> letters(kMessages, Letter{std::vector<char>(100)});
    const auto operation = member.rank == 0 ? lockstep::Operation::send : lockstep::Operation::recv;
    for (int i = 0; i < kMessages; ++i) {
      letters[static_cast<std::size_t>(i)].ended = std::make_shared<std::promise<std::string>>();
      letters[static_cast<std::size_t>(i)].post(*member.messages, operation, member.rank, 1 - member.rank, i);
    }
    if (member.rank == 0) ::raise(SIGSTOP);
    for (auto& letter : letters)
      if (const auto error = letter.end(*member.messages); !error.empty()) {
        std::printf("rank %d: %s\n", member.rank, error.c_str());
        return 1;
      }
    return 0;
  });
  ASSERT_TRUE(processes.met());
  const auto limit = Clock::now() + seconds(60);
  while (control::look_at(processes.pid(0))->state != 'T' && Clock::now() < limit)
    std::this_thread::sleep_for(milliseconds(1));
  // Rank 1 has all messages by now and leaves. It waits up to 2 s for rank 0.
  std::this_thread::sleep_for(milliseconds(100));
  processes.kill(0, SIGCONT);
  const auto ended = processes.wait();
  EXPECT_EQ(ended[0].status, 0);
  EXPECT_EQ(ended[1].status, 0);
}

class TwoRanks : public ::testing::Test {
 protected:
  TwoRanks() {
    Region region(memory_of_region_.get(), 2);
    region.prepare();
    for (int r : {0, 1}) {
      meetings_[r] = std::make_unique<Barrier>(region, r, std::chrono::nanoseconds(0));
      messages_[r] =
          std::make_shared<Messages>(*meetings_[r], memory_, std::chrono::nanoseconds(0), memory_of_region_);
    }
  }
  ~TwoRanks() override {
    for (int r : {0, 1}) messages_[r]->close();
    // Their threads use the barriers until they end.
    for (int r : {0, 1})
      while (messages_[r].use_count() > 1) std::this_thread::sleep_for(milliseconds(1));
  }

  ThreadMemory memory_;
  std::shared_ptr<char> memory_of_region_{
      static_cast<char*>(std::aligned_alloc(128, (Region::size_for(2) + 127) / 128 * 128)), &std::free};
  std::unique_ptr<Barrier> meetings_[2];
  std::shared_ptr<Messages> messages_[2];
};

TEST_F(TwoRanks, a_message_that_could_not_be_taken_is_an_error_at_both_ends) {
  memory_.on_map = [](int, Place) { throw Error("no memory to map it"); };
  Letter sent{std::vector<char>(100)}, received{std::vector<char>(100)};
  sent.post(*messages_[0], lockstep::Operation::send, 0, 1, 0);
  received.post(*messages_[1], lockstep::Operation::recv, 1, 0, 0);
  EXPECT_THAT(received.end(*messages_[1]), HasSubstr("no memory"));
  EXPECT_THAT(sent.end(*messages_[0]), HasSubstr("could not accept it"));
}

// In any order of tags, with all of them pending at once.
TEST_F(TwoRanks, thousands_are_sorted_out_in_time) {
  constexpr int kMany = 10000;
  std::vector<Letter> sent(kMany), received(kMany);
  auto letter = [](int i) {
    Letter made{std::vector<char>(sizeof i)};
    std::memcpy(made.data.data(), &i, sizeof i);
    return made;
  };
  const auto began = Clock::now();
  for (int i = 0; i < kMany; ++i) {
    sent[static_cast<std::size_t>(i)] = letter(i);
    sent[static_cast<std::size_t>(i)].post(*messages_[0], lockstep::Operation::send, 0, 1, i);
  }
  for (int i = 0; i < kMany; ++i) {
    received[static_cast<std::size_t>(i)] = letter(-1);
    received[static_cast<std::size_t>(i)].post(*messages_[1], lockstep::Operation::recv, 1, 0, kMany - 1 - i);
  }
  for (auto& each : received) ASSERT_EQ(each.end(*messages_[1]), "");
  for (auto& each : sent) ASSERT_EQ(each.end(*messages_[0]), "");
  for (int i = 0; i < kMany; ++i)
    ASSERT_EQ(received[static_cast<std::size_t>(i)].data, letter(kMany - 1 - i).data);
  RecordProperty("seconds", std::to_string(std::chrono::duration<double>(Clock::now() - began).count()));
}

TEST(Messages, waiting_for_one_costs_next_to_nothing) {
  auto used = [] {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    return milliseconds(1000 * (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
                        (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1000);
  };
  Processes processes(2, [&](Member& member) {
    char data[10] = {};
    if (member.rank == 1) {
      std::this_thread::sleep_for(seconds(1));
      member.send(data, sizeof data, 0, 0);
      return 0;
    }
    const auto before = used();
    member.receive(data, sizeof data, 1, 0);
    return static_cast<int>(std::min<std::int64_t>((used() - before).count(), 100));  // a status has 8 bits
  });
  EXPECT_LT(processes.wait()[0].status, 20) << "milliseconds of a processor, in a second";
}

}  // namespace
}  // namespace lockstep::shm

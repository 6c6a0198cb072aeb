#include <lockstep/control/board/flight_ring.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <limits>
#include <memory>
#include <thread>

#include <lockstep/control/board/board.h>
#include <lockstep/control/board/flight.h>

#include "support/errors.h"

namespace lockstep::control {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

CallTexts texts(std::string_view operation, std::string_view site) {
  CallTexts all{};
  CallTexts::set(all.operation, operation);
  CallTexts::set(all.dtype, "float32");
  CallTexts::set(all.reduction, "sum");
  CallTexts::set(all.site, site);
  return all;
}

struct FlightRingTest : ::testing::Test {
  std::shared_ptr<Board> board = std::make_shared<Board>(2);
  FlightRing& ring = board->ring(1);
  void SetUp() override { board->prepare(1); }
  FlightRing::Ticket begin(std::int64_t sequence) {
    return ring.begin({.key = 5, .sequence = sequence, .count = 10, .bytes = 40},
                      texts("all_reduce", "a.cpp:1"), 3);
  }
};

TEST_F(FlightRingTest, what_a_pen_writes_is_read) {
  StatusWriter status(board, 1);
  status.step(12);
  const auto first = status.began(-1, {.key = -7, .sequence = 41, .count = 10, .bytes = 40, .peer = 1},
                                  texts("broadcast", "train.cpp:80"));
  const auto second =
      status.began(-1, {.key = 9, .sequence = 2, .peer = 0, .message = true}, texts("send", "pipe.cpp:3"));
  status.began(-1, {.key = -7, .sequence = 42}, texts("barrier", "train.cpp:81"));
  status.ended(-1, 41, first, false);
  status.ended(-1, 2, second, true);
  const auto log = board->flight(1);
  EXPECT_EQ(log.begun, 3);
  ASSERT_THAT(log.entries, SizeIs(3));
  auto expected = log.entries[0];
  expected.key = -7, expected.message = false, expected.sequence = 41, expected.step = 12;
  expected.operation = "broadcast", expected.dtype = "float32", expected.reduction = "sum";
  expected.site = "train.cpp:80", expected.count = 10, expected.bytes = 40, expected.peer = 1;
  expected.failed = false;
  EXPECT_EQ(log.entries[0], expected);
  EXPECT_GT(log.entries[0].began_ns, 0);
  EXPECT_GE(log.entries[0].ended_ns, log.entries[0].began_ns);
  EXPECT_TRUE(log.entries[1].message);
  EXPECT_TRUE(log.entries[1].failed);
  EXPECT_GT(log.entries[1].ended_ns, 0);
  EXPECT_EQ(log.entries[2].ended_ns, 0);
  EXPECT_THAT(board->flight(0).entries, IsEmpty()) << "of another rank";
}

TEST_F(FlightRingTest, keeps_the_last_thousand) {
  std::vector<FlightRing::Ticket> tickets;
  for (int i = 0; i < 5000; ++i) tickets.push_back(begin(i));
  ring.end(tickets[10], 77, false);  // Its slot has been reused.
  ring.end(tickets[4500], 99, false);
  const auto log = ring.read();
  EXPECT_EQ(log.begun, 5000);
  ASSERT_THAT(log.entries, SizeIs(FlightRing::kKept));
  for (int i = 0; i < FlightRing::kKept; ++i) {
    EXPECT_EQ(log.entries[static_cast<std::size_t>(i)].sequence, 4000 + i);
    EXPECT_EQ(log.entries[static_cast<std::size_t>(i)].ended_ns, i == 500 ? 99 : 0);
  }
  board->prepare(1);
  EXPECT_THAT(ring.read().entries, IsEmpty());
}

// As left by a rank killed between two words: the version is odd, whatever the count.
TEST_F(FlightRingTest, a_record_that_was_not_finished_is_left_out) {
  begin(0);
  begin(1);
  begin(2);
  auto* words = reinterpret_cast<std::atomic<std::uint64_t>*>(&ring);
  std::size_t found = 0;
  for (std::size_t i = 1; found == 0 && i < 100; ++i)
    if (words[i].load() == 4) found = i;  // The second operation's version.
  ASSERT_NE(found, 0u);
  words[found] = 3;
  const auto log = ring.read();
  ASSERT_THAT(log.entries, SizeIs(2));
  EXPECT_EQ(log.entries[0].sequence, 0);
  EXPECT_EQ(log.entries[1].sequence, 2);
}

TEST_F(FlightRingTest, that_was_written_over_harms_nobody) {
  for (int fill : {0x01, 0x02, 0x7f, 0x80, 0xff}) {
    board->prepare(1);
    begin(0);
    std::memset(static_cast<void*>(&ring), fill, sizeof ring);
    const auto log = ring.read();
    EXPECT_GE(log.begun, 0);
    EXPECT_THAT(log.entries, IsEmpty());
  }
  board->prepare(1);
  begin(0);
  auto* bytes = reinterpret_cast<char*>(&ring);
  auto* text = static_cast<char*>(::memmem(bytes, sizeof ring, "a.cpp", 5));
  ASSERT_NE(text, nullptr);
  std::memset(text, 0xc3, 48);
  const auto log = ring.read();
  ASSERT_THAT(log.entries, SizeIs(1));
  EXPECT_EQ(log.entries[0].site, std::string(48, '?'));
}

// Entries are sent on, and one that cannot be sent would keep the job from ending.
TEST_F(FlightRingTest, a_number_that_makes_no_sense_is_left_out) {
  using Time = std::chrono::steady_clock::time_point;
  const auto add = [&](int peer, Time at = std::chrono::steady_clock::now()) {
    return ring.begin({.key = 5, .peer = peer, .at = at}, texts("send", "a.cpp:1"), 3);
  };
  add(1 << 24);
  add(std::numeric_limits<int>::max());
  add(1, Time::max());
  ring.end(add(1), std::numeric_limits<std::int64_t>::max(), false);
  ring.end(add(1), std::numeric_limits<std::int64_t>::max(), true);
  ring.end(add(kMostRanks - 1), 99, false);
  RankFlight flight{.log = ring.read()};
  ASSERT_THAT(flight.log.entries, SizeIs(1));
  for (auto& entry : flight.log.entries) entry.began_ns += std::int64_t{1} << 61;  // As the agent does.
  EXPECT_THAT(RankFlight::decode(flight.encode()).log.entries, SizeIs(1));
}

TEST_F(FlightRingTest, a_reader_never_sees_half_a_record) {
  std::atomic<bool> end = false;
  std::thread writer([&] {
    const CallTexts kinds[] = {texts("even", "even.cpp"), texts("odd", "odd.cpp")};
    for (std::int64_t i = 0; !end; ++i)
      ring.end(ring.begin({.sequence = i, .count = i, .bytes = i}, kinds[i % 2], i), i + 1, i % 3 == 0);
  });
  std::size_t seen = 0;
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (seen < 20'000 && std::chrono::steady_clock::now() < limit)
    for (const auto& entry : ring.read().entries) {
      ++seen;
      ASSERT_EQ(entry.operation, entry.sequence % 2 ? "odd" : "even");
      ASSERT_EQ(entry.site, entry.operation + ".cpp");
      ASSERT_EQ(entry.count, entry.sequence);
      ASSERT_EQ(entry.step, entry.sequence);
      if (entry.ended_ns != 0) {
        ASSERT_EQ(entry.ended_ns, entry.sequence + 1);
        ASSERT_EQ(entry.failed, entry.sequence % 3 == 0);
      }
    }
  EXPECT_GE(seen, 20'000u);
  end = true;
  writer.join();
}

// Wherever the kernel stops it, what is read afterwards is consistent.
TEST_F(FlightRingTest, a_rank_killed_while_it_writes_leaves_whole_records) {
  for (int round = 0; round < 20; ++round) {
    board->prepare(1);
    const pid_t child = ::fork();
    if (child == 0)
      for (std::int64_t i = 0;; ++i) ring.end(begin(i), i + 1, false);
    while (ring.read().begun < 100) ::usleep(100);
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    const auto log = ring.read();
    ASSERT_EQ(static_cast<std::int64_t>(log.entries.size()),
              std::min<std::int64_t>(FlightRing::kKept, log.begun));
    for (std::size_t i = 1; i < log.entries.size(); ++i)
      ASSERT_EQ(log.entries[i].sequence, log.entries[i - 1].sequence + 1);
    EXPECT_EQ(log.entries.back().sequence, log.begun - 1);
  }
}

}  // namespace
}  // namespace lockstep::control

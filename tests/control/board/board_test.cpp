#include <lockstep/control/board/board.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "support/errors.h"

namespace lockstep::control {
namespace {

using std::chrono::milliseconds;
using ::testing::IsEmpty;
using ::testing::SizeIs;

FlightRing::Ticket began(StatusWriter& status, int line, std::int64_t sequence, std::string_view operation,
                         std::string_view site, int peer) {
  CallTexts texts{};
  CallTexts::set(texts.operation, operation);
  CallTexts::set(texts.site, site);
  return status.began(line, {.key = 77, .sequence = sequence, .peer = peer, .message = peer >= 0}, texts);
}

TEST(Board, what_a_rank_writes_the_agent_reads) {
  auto board = std::make_shared<Board>(4);
  board->prepare(2);
  EXPECT_EQ(board->rows(2).step, -1);
  EXPECT_THAT(board->rows(2).rows, IsEmpty());
  StatusWriter status(board, 2);
  const int line = status.add_line(77, "world", false);
  status.step(12);
  began(status, line, 5, "all_reduce", "train.cpp:42", -1);
  status.waits(line, 5);
  auto rows = board->rows(2);
  EXPECT_EQ(rows.step, 12);
  ASSERT_THAT(rows.rows, SizeIs(1));
  EXPECT_EQ(rows.rows[0].key, 77);
  EXPECT_EQ(rows.rows[0].group, "world");
  EXPECT_EQ(rows.rows[0].operation, "all_reduce");
  EXPECT_EQ(rows.rows[0].site, "train.cpp:42");
  EXPECT_EQ(rows.rows[0].sequence, 5);
  EXPECT_EQ(rows.rows[0].waits_for, 5);
  EXPECT_TRUE(rows.rows[0].running);
  status.waited(line, 5);
  status.ended(line, 5, FlightRing::kNone, false);
  rows = board->rows(2);
  EXPECT_FALSE(rows.rows[0].running);
  EXPECT_EQ(rows.rows[0].waits_for, -1);
  EXPECT_THAT(board->rows(1).rows, IsEmpty()) << "of another rank";
}

TEST(Board, lines_of_groups_that_are_gone_are_used_again_when_needed) {
  auto board = std::make_shared<Board>(1);
  board->prepare(0);
  StatusWriter status(board, 0);
  std::vector<int> lines;
  for (int line = status.add_line(0, "g", false); line >= 0; line = status.add_line(0, "g", false))
    lines.push_back(line);
  ASSERT_GT(lines.size(), 8u);
  EXPECT_EQ(status.add_line(1, "more", false), -1);
  began(status, -1, 0, "all_reduce", "", -1);  // No line, no harm.
  status.drop_line(lines[3]);
  EXPECT_EQ(status.add_line(1, "more", false), lines[3]);
  EXPECT_EQ(status.add_line(1, "more", false), -1);
}

TEST(Board, long_names_are_cut) {
  auto board = std::make_shared<Board>(1);
  board->prepare(0);
  StatusWriter status(board, 0);
  began(status, status.add_line(1, std::string(500, 'g'), false), 0, std::string(500, 'o'),
        std::string(500, 's'), -1);
  const auto rows = board->rows(0);
  EXPECT_LT(rows.rows[0].group.size(), 64u);
  EXPECT_EQ(Rows::decode(rows.encode()).rows[0].site, rows.rows[0].site);
}

// After a stray write of the program, what is read can still be sent and received.
TEST(Board, a_page_that_was_written_over_harms_nobody) {
  auto board = std::make_shared<Board>(1);
  auto* bytes = reinterpret_cast<char*>(&board->page(0));
  for (int fill : {0x02, 0x7e, 0x80, 0xfe}) {  // Even: the lines count as complete.
    board->prepare(0);
    StatusWriter status(board, 0);
    const int line = status.add_line(1, "g", false);
    began(status, line, 5, "all_reduce", "train.cpp:42", -1);
    std::memset(bytes + sizeof(pthread_mutex_t), fill, 8192 - sizeof(pthread_mutex_t));
    const auto rows = board->rows(0);
    ASSERT_THAT(rows.rows, ::testing::Not(IsEmpty()));
    const auto read = Rows::decode(rows.encode());
    EXPECT_GE(read.step, -1);
    for (const Row& row : read.rows) {
      EXPECT_GE(row.sequence, -1);
      EXPECT_GE(row.peer, -1);
      EXPECT_GE(row.since_ms, 0);
      EXPECT_LE(row.waited_ms, 24 * 3600 * 1000);
    }
  }
}

TEST(Board, a_reader_never_sees_half_a_line) {
  auto board = std::make_shared<Board>(1);
  board->prepare(0);
  StatusWriter status(board, 0);
  const int line = status.add_line(1, "g", false);
  std::atomic<bool> end = false;
  std::thread writer([&] {
    for (int i = 0; !end; ++i)
      began(status, line, i, i % 2 ? "odd" : "even", i % 2 ? "odd.cpp" : "even.cpp", i);
  });
  for (int i = 0; i < 20000; ++i)
    for (const Row& row : board->rows(0).rows) {
      if (row.sequence < 0) continue;
      ASSERT_EQ(row.operation, row.sequence % 2 ? "odd" : "even");
      ASSERT_EQ(row.site, row.operation + ".cpp");
      ASSERT_EQ(row.peer, row.sequence);
    }
  end = true;
  writer.join();
}

TEST(Board, a_death_is_told_from_letting_go) {
  auto board = std::make_shared<Board>(2);
  board->prepare(0);
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    board->hold(0);
    [[maybe_unused]] auto written = ::write(ready[1], "x", 1);
    ::pause();
    ::_exit(0);
  }
  char byte;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_EQ(board->holder_died(0, milliseconds(50)), std::nullopt);
  ::kill(child, SIGKILL);
  EXPECT_EQ(board->holder_died(0, milliseconds(60000)), true);
  ::waitpid(child, nullptr, 0);
  for (int fd : ready) ::close(fd);

  board->prepare(1);
  std::atomic<bool> held = false;
  std::thread holder([&] {
    board->hold(1);
    held = true;
    std::this_thread::sleep_for(milliseconds(50));
    board->let_go(1);
  });
  while (!held) std::this_thread::yield();
  EXPECT_EQ(board->holder_died(1, milliseconds(60000)), false);
  holder.join();
}

}  // namespace
}  // namespace lockstep::control

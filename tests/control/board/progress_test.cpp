// Timing of a rank's steps, and their record on its page.
#include <lockstep/control/board/progress.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <thread>

#include <lockstep/control/board/board.h>

#include "support/errors.h"

namespace lockstep::control {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr std::int64_t kMs = 1'000'000;

// Zero-initialised, like the agent's pages.
std::unique_ptr<StepRecord> page() { return std::unique_ptr<StepRecord>(new StepRecord()); }

TEST(StepTimer, tells_how_long_a_step_took_and_how_much_of_it_was_waiting) {
  StepTimer watch;
  EXPECT_FALSE(watch.is_of_this_thread());
  EXPECT_FALSE(watch.step(7, 0)[1]) << "none has ended";
  EXPECT_TRUE(watch.is_of_this_thread());
  watch.waits(10 * kMs);
  EXPECT_TRUE(watch.is_waiting());
  watch.waited(35 * kMs);
  watch.waited(36 * kMs);  // Of another operation: no wait has begun.
  EXPECT_FALSE(watch.step(7, 50 * kMs)[1]) << "it is the same step still";
  const auto time = watch.step(8, 100 * kMs)[1];
  ASSERT_TRUE(time);
  EXPECT_EQ(time->step, 7);
  EXPECT_EQ(time->steps, 1);
  EXPECT_EQ(time->took_us, 100'000);
  EXPECT_EQ(time->waited_us, 25'000);
}

TEST(StepTimer, tells_of_short_steps_together_and_of_the_same_on_every_rank) {
  StepTimer one, other;
  std::vector<std::int64_t> told;
  std::int64_t now = 0;
  int both = 0;
  other.step(0, now);
  one.step(0, now);
  for (std::int64_t step = 1; step <= 4000; ++step) {
    now += 2 * kMs + step % 3 * kMs / 4;
    const auto first = one.step(step, now)[1], second = other.step(step, now + step % 5 * kMs / 10)[1];
    if (first) told.push_back(first->step);
    both += first && second;
  }
  EXPECT_LT(told.size(), 180u);
  EXPECT_GT(told.size(), 60u);
  EXPECT_GE(both, static_cast<int>(told.size()) - 5) << "but for the first";
  EXPECT_EQ((told.back() + 1) % 32, 0);
}

TEST(StepTimer, tells_of_a_long_step_by_itself) {
  StepTimer watch;
  std::int64_t now = 0;
  for (std::int64_t step = 0; step <= 18; ++step, now += 20 * kMs)
    watch.step(step, now);  // 16 and 17 are not reported.
  watch.waits(now);
  watch.waited(now + 30 * kMs);
  const auto times = watch.step(19, now + 80 * kMs);  // Step 18 took 100 ms.
  ASSERT_TRUE(times[0] && times[1]);
  EXPECT_EQ(times[0]->step, 17);
  EXPECT_EQ(times[0]->steps, 2);
  EXPECT_EQ(times[0]->took_us, 40'000);
  EXPECT_EQ(times[0]->waited_us, 0);
  EXPECT_EQ(times[1]->step, 18);
  EXPECT_EQ(times[1]->steps, 1);
  EXPECT_EQ(times[1]->took_us, 100'000);
  EXPECT_EQ(times[1]->waited_us, 30'000);
  const auto next = watch.step(20, now + 180 * kMs);
  ASSERT_TRUE(next[1]);
  EXPECT_EQ(next[1]->steps, 1);
  EXPECT_EQ(next[1]->waited_us, 0);
}

TEST(StepTimer, tells_of_steps_that_are_no_multiples_of_anything) {
  StepTimer watch;
  int told = 0;
  for (std::int64_t i = 0; i < 3000; ++i) told += watch.step(2 * i, i * kMs)[1].has_value();
  EXPECT_GE(told, 5);
}

TEST(StepTimer, begins_anew_in_another_thread) {
  StepTimer watch;
  watch.step(0, 0);
  std::thread([&] {
    EXPECT_FALSE(watch.is_of_this_thread());
    EXPECT_FALSE(watch.step(1, 100 * kMs)[1]);
    EXPECT_TRUE(watch.step(2, 200 * kMs)[1]);
  }).join();
}

TEST(StepRecord, hands_out_each_time_once) {
  auto progress = page();
  std::uint64_t seen = 0;
  EXPECT_THAT(progress->times(seen), IsEmpty());
  for (int i = 0; i < 3; ++i) progress->add({.step = i, .steps = 1, .took_us = 10 + i, .waited_us = i});
  const auto times = progress->times(seen);
  ASSERT_THAT(times, SizeIs(3));
  EXPECT_EQ(times[2].step, 2);
  EXPECT_EQ(times[2].took_us, 12);
  EXPECT_EQ(times[2].waited_us, 2);
  EXPECT_THAT(progress->times(seen), IsEmpty());
  for (int i = 3; i < 103; ++i) progress->add({.step = i});
  const auto last = progress->times(seen);
  ASSERT_THAT(last, SizeIs(15)) << "those before are written over";
  EXPECT_EQ(last.front().step, 88);
  EXPECT_EQ(last.back().step, 102);
  seen = 1000;  // From the page of another process.
  EXPECT_THAT(progress->times(seen), SizeIs(15));
}

TEST(StepRecord, readers_find_only_what_was_written) {
  auto progress = page();
  std::atomic<bool> done = false;
  std::thread writer([&] {
    for (std::int64_t i = 0; i < 200'000; ++i)
      progress->add({.step = i, .steps = i + 1, .took_us = 3 * i, .waited_us = 2 * i});
    done = true;
  });
  std::uint64_t seen = 0;
  std::int64_t before = -1;
  while (!done) {
    for (const auto& time : progress->times(seen)) {
      ASSERT_GT(time.step, before);
      before = time.step;
      ASSERT_EQ(time.steps, time.step + 1);
      ASSERT_EQ(time.took_us, 3 * time.step);
      ASSERT_EQ(time.waited_us, 2 * time.step);
    }
  }
  writer.join();
}

TEST(StepRecord, keeps_the_last_value_of_a_few_metrics_and_always_the_loss) {
  auto progress = page();
  for (const char* name : {"a", "b", "c", "d", "e", "f"}) progress->metric(name, 1, 3);
  progress->metric("loss", 0.5, 4);
  progress->metric("a", 2, 5);
  progress->metric("a name that is longer than there is room for", 2, 5);
  std::vector<std::string> names;
  for (const auto& metric : progress->metrics()) names.push_back(metric.name);
  EXPECT_THAT(names, ElementsAre("loss", "a", "b", "c", "d"));
  EXPECT_EQ(progress->metrics()[0].value, 0.5);
  EXPECT_EQ(progress->metrics()[1].value, 2);
  EXPECT_EQ(progress->metrics()[1].step, 5);
}

TEST(StepRecord, long_names_lose_their_middle_and_stay_apart) {
  auto progress = page();
  progress->metric("evaluation/accuracy/top1", 1, 0);
  progress->metric("evaluation/accuracy/top5", 5, 0);
  progress->metric("a name of 23 bytes here", 2, 0);
  progress->metric("aaaaaaaaaa\xc3\xa4 and more \xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4.", 3, 0);
  std::vector<std::string> names;
  for (const auto& metric : progress->metrics()) names.push_back(metric.name);
  EXPECT_THAT(names,
              ElementsAre("evaluation..curacy/top1", "evaluation..curacy/top5", "a name of 23 bytes here",
                          "aaaaaaaaaa..\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4."));
  EXPECT_EQ(progress->metrics()[0].value, 1);
}

TEST(StepRecord, any_byte_of_it_may_be_wrong) {
  auto progress = page();
  std::memset(static_cast<void*>(progress.get()), 0xff, sizeof *progress);
  std::uint64_t seen = 0;
  for (const auto& time : progress->times(seen)) {
    EXPECT_GE(time.step, -1);
    EXPECT_GE(time.steps, 1);
    EXPECT_LE(time.waited_us, time.took_us);
  }
  Rows rows;
  seen = 0;
  rows.times = progress->times(seen);
  rows.metrics = progress->metrics();
  EXPECT_EQ(Rows::decode(rows.encode()).metrics.size(), rows.metrics.size());
}

// A page has few lines; waits in groups without a line count too.
TEST(Board, counts_waits_of_groups_without_a_line) {
  auto board = std::make_shared<Board>(1);
  board->prepare(0);
  StatusWriter status(board, 0);
  std::uint64_t seen = 0;
  status.step(0);
  const auto ticket = status.began(-1, {.key = 77, .sequence = 0}, CallTexts{});
  status.waits(-1, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(70));
  status.ended(-1, 0, ticket, false);
  status.step(1);
  const auto rows = board->rows(0, seen);
  ASSERT_THAT(rows.times, SizeIs(1));
  EXPECT_GE(rows.times[0].waited_us, 69'000);
}

TEST(Board, has_a_ranks_steps_and_metrics) {
  auto board = std::make_shared<Board>(2);
  board->prepare(1);
  StatusWriter status(board, 1);
  std::uint64_t seen = 0;
  const int line = status.add_line(77, "world", false);
  status.step(3);
  const auto ticket = status.began(line, {.key = 77, .sequence = 0}, CallTexts{});
  status.waits(line, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(70));
  status.ended(line, 0, ticket, false);
  status.step(4);
  status.metric("loss", std::nan(""), 3);
  const auto rows = Rows::decode(board->rows(1, seen).encode());
  ASSERT_THAT(rows.times, SizeIs(1));
  EXPECT_EQ(rows.times[0].step, 3);
  EXPECT_GE(rows.times[0].waited_us, 69'000);
  EXPECT_LE(rows.times[0].waited_us, rows.times[0].took_us);
  ASSERT_THAT(rows.metrics, SizeIs(1));
  EXPECT_TRUE(std::isnan(rows.metrics[0].value));
  EXPECT_THAT(board->rows(1, seen).times, IsEmpty());
}

}  // namespace
}  // namespace lockstep::control

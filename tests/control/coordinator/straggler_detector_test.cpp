// Detection of slow ranks, from synthetic step times.
#include <lockstep/control/coordinator/straggler_detector.h>

#include <cmath>
#include <functional>
#include <random>

#include <fmt/format.h>

#include "support/errors.h"

namespace lockstep::control {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// Steps of ranks that wait for the slowest; busy(rank, step) in ms.
class Job {
 public:
  explicit Job(int ranks) : ranks_(ranks) {}
  using Busy = std::function<double(int, std::int64_t)>;

  void run(std::int64_t steps, const Busy& busy) {
    for (const auto end = step_ + steps; step_ < end; ++step_) {
      std::vector<double> times;
      double longest = 0;
      for (int r = 0; r < ranks_; ++r) {
        times.push_back(busy(r, step_));
        longest = std::max(longest, times.back());
      }
      for (int r = 0; r < ranks_; ++r)
        detector.note(r, {.step = step_,
                          .steps = 1,
                          .took_us = static_cast<std::int64_t>((longest + 1) * 1000),
                          .waited_us = static_cast<std::int64_t>(
                              (longest + 1 - times[static_cast<std::size_t>(r)]) * 1000)});
      for (auto& line : detector.judge()) {
        lines.push_back(std::move(line));
        told_at.push_back(step_);
      }
    }
  }

  StragglerDetector detector;
  std::vector<std::string> lines;
  std::vector<std::int64_t> told_at;

 private:
  const int ranks_;
  std::int64_t step_ = 0;
};

TEST(StragglerDetector, waiting_for_a_turn_on_a_shared_processor_is_not_slow) {
  Job job(8);
  job.detector.set_crowded(true);
  job.run(40, [](int, std::int64_t) { return 0.2; });
  job.run(40, [](int rank, std::int64_t) { return rank == 1 ? 60 : 0.2; });
  EXPECT_THAT(job.lines, IsEmpty());
  job.run(40, [](int rank, std::int64_t) { return rank == 1 ? 1500 : 300; });
  EXPECT_THAT(job.lines, ElementsAre(HasSubstr("rank 1 is slow")));
}

TEST(StragglerDetector, names_a_rank_slowed_to_a_fifth_after_three_steps_and_tells_when_it_has_recovered) {
  Job job(4);
  job.run(17, [](int, std::int64_t) { return 20; });
  job.run(20, [](int rank, std::int64_t) { return rank == 2 ? 96 : 20; });
  ASSERT_THAT(
      job.lines,
      ElementsAre(
          "rank 2 is slow: its steps take 4.8 times as long as the other ranks' (busy 96 ms, others 20 "
          "ms, steps 17 to 19)"));
  EXPECT_EQ(job.told_at[0], 19);
  job.run(10, [](int rank, std::int64_t) { return rank == 2 ? 22 : 20; });
  ASSERT_THAT(job.lines, SizeIs(2));
  EXPECT_EQ(
      job.lines[1],
      "rank 2 is no longer slow: its steps take 1.1 times as long as the other ranks' (busy 22 ms, step 41)");
}

TEST(StragglerDetector, finds_it_with_any_number_of_ranks_and_from_the_first_steps_on) {
  for (int ranks : {2, 3, 4, 5, 8, 64}) {
    Job job(ranks);
    job.run(30, [&](int rank, std::int64_t) { return rank == ranks - 1 ? 50 : 10; });
    ASSERT_THAT(job.lines, SizeIs(1)) << ranks;
    EXPECT_THAT(job.lines[0], HasSubstr(fmt::format("rank {} is slow: its steps take 5.0 times", ranks - 1)));
    EXPECT_LE(job.told_at[0], 6) << "three steps after the first ones, which are not counted";
  }
}

TEST(StragglerDetector, names_half_of_the_ranks_where_a_whole_host_is_slow) {
  Job job(8);
  job.run(20, [](int, std::int64_t) { return 30; });
  job.run(10, [](int rank, std::int64_t) { return rank >= 4 ? 150 : 30; });
  EXPECT_THAT(job.lines, SizeIs(4));
}

TEST(StragglerDetector, says_nothing_of_first_steps_single_long_ones_and_short_ones) {
  Job job(2);
  job.run(3, [](int rank, std::int64_t) { return rank == 0 ? 5000 : 100; });  // One-time work.
  // Saves checkpoints.
  job.run(500, [](int rank, std::int64_t step) { return rank == 0 && step % 50 < 2 ? 2000 : 20; });
  job.run(500, [](int rank, std::int64_t) { return rank == 0 ? 1.5 : 0.1; });  // A millisecond.
  EXPECT_THAT(job.lines, IsEmpty());
}

TEST(StragglerDetector, nobody_is_slow_because_others_have_less_to_do) {
  Job job(2);
  job.run(50, [](int, std::int64_t) { return 40; });
  job.run(50, [](int rank, std::int64_t) { return rank == 0 ? 40 : 0.5; });
  EXPECT_THAT(job.lines, IsEmpty());
}

TEST(StragglerDetector, work_that_grows_on_every_rank_is_nobodys_fault) {
  Job job(4);
  job.run(1000, [](int, std::int64_t step) { return 10 + static_cast<double>(step); });
  job.run(100, [](int, std::int64_t) { return 5; });
  job.run(100, [](int, std::int64_t) { return 5000; });
  EXPECT_THAT(job.lines, IsEmpty());
}

TEST(StragglerDetector, stages_of_a_pipeline_are_compared_with_themselves) {
  const auto stage = [](int rank, std::int64_t) { return rank == 0 ? 4.0 : rank == 3 ? 80.0 : 20.0; };
  Job job(4);
  job.detector.has_stages();
  job.run(1000, stage);
  EXPECT_THAT(job.lines, IsEmpty()) << "uneven, and steady";
  job.run(3, [&](int rank, std::int64_t step) { return stage(rank, step) * (rank == 0 ? 5 : 1); });
  EXPECT_THAT(job.lines,
              ElementsAre("rank 0 is slow: its steps take 5.0 times as long as before (busy 20 ms, before "
                          "4.0 ms, steps 1000 to 1002)"));
}

TEST(StragglerDetector, compares_the_same_steps_whenever_they_are_told_and_whatever_is_missing) {
  StragglerDetector detector;
  std::vector<std::string> lines;
  auto tell = [&](int rank, std::int64_t step, std::int64_t busy_ms) {
    detector.note(rank,
                  {.step = step, .steps = 1, .took_us = 200'000, .waited_us = 200'000 - busy_ms * 1000});
    for (auto& line : detector.judge()) lines.push_back(line);
  };
  // Every tenth step is long for all; rank 1 reports late, and some reports are lost.
  for (std::int64_t block = 0; block < 100; ++block) {
    for (std::int64_t i = 0; i < 8; ++i)
      if (i != 3) tell(0, 8 * block + i, i < 4 ? 150 : 10);
    for (std::int64_t i = 0; i < 8; ++i)
      if (i != 5) tell(1, 8 * block + i, i < 4 ? 150 : 10);
  }
  EXPECT_THAT(lines, IsEmpty());
  // Counted from 0 again.
  for (std::int64_t step = 0; step < 3; ++step) tell(0, step, 10);
  for (std::int64_t step = 0; step < 3; ++step) tell(1, step, 190);
  EXPECT_THAT(lines, SizeIs(1));
}

TEST(StragglerDetector, does_not_wait_for_a_rank_that_makes_no_more_steps) {
  Job job(3);
  job.run(10, [](int, std::int64_t) { return 20; });
  for (std::int64_t step = 10; step < 200; ++step) {
    for (int rank : {0, 1})
      job.detector.note(rank,
                        {.step = step, .steps = 1, .took_us = 100'000, .waited_us = rank == 0 ? 0 : 80'000});
    for (auto& line : job.detector.judge()) job.lines.push_back(line);
  }
  EXPECT_THAT(job.lines, ElementsAre(HasSubstr("rank 0 is slow: its steps take 5.0 times")));
}

// Steps are counted from 0 in each epoch, and only one rank makes many, for example for an evaluation.
TEST(StragglerDetector, compares_ranks_again_that_were_apart_for_long) {
  StragglerDetector detector;
  std::vector<std::string> lines;
  const auto epoch = [&](std::int64_t us_of_rank_1) {
    for (std::int64_t step = 0; step < 100; ++step) {
      detector.note(0, {.step = step, .took_us = us_of_rank_1, .waited_us = us_of_rank_1 - 100'000});
      detector.note(1, {.step = step, .took_us = us_of_rank_1});
      for (auto& line : detector.judge()) lines.push_back(std::move(line));
    }
  };
  for (int i = 0; i < 3; ++i) epoch(100'000);
  for (std::int64_t step = 100; step < 300; ++step) {
    detector.note(0, {.step = step, .took_us = 100'000});
    detector.judge();
  }
  EXPECT_THAT(lines, IsEmpty());
  for (int i = 0; i < 2; ++i) epoch(500'000);
  EXPECT_THAT(lines, ElementsAre(HasSubstr("rank 1 is slow: its steps take 5.0 times")));
  EXPECT_NEAR(detector.status()->steps_per_second, 2, 0.1);
}

TEST(StragglerDetector, one_that_is_slow_again_and_again_is_named_less_and_less) {
  Job job(2);
  for (int i = 0; i < 200; ++i) {
    job.run(10, [](int rank, std::int64_t) { return rank == 0 ? 100 : 20; });
    job.run(20, [](int, std::int64_t) { return 20; });
  }
  EXPECT_LE(job.lines.size(), 6u);
}

// Noise of a busy machine: one step in twenty of a rank takes longer, by a factor without a mean (Pareto, 1),
// capped at 50; in addition, all times vary by about a tenth. Bursts of two steps occur too.
TEST(StragglerDetector, gives_no_false_alarm_in_healthy_steps_with_heavy_tailed_noise) {
  constexpr std::int64_t kSteps = 25'000;
  int alarms = 0;
  std::int64_t long_steps = 0;
  for (const double base : {0.5, 3.0, 20.0, 300.0})
    for (const int ranks : {2, 3, 8}) {
      std::mt19937_64 random(static_cast<std::uint64_t>(ranks * 1000) + static_cast<std::uint64_t>(base));
      std::uniform_real_distribution<double> uniform(1e-9, 1);
      std::lognormal_distribution<double> spread(0, 0.15);
      std::vector<double> burst(static_cast<std::size_t>(ranks), 0);
      Job job(ranks);
      job.run(kSteps, [&](int rank, std::int64_t) {
        double& held = burst[static_cast<std::size_t>(rank)];
        double factor = spread(random);
        if (held > 0) {
          factor *= std::exchange(held, 0);
        } else if (uniform(random) < 0.05) {
          const double tail = std::min(50.0, 1 / uniform(random));
          long_steps += tail > 2;
          factor *= tail;
          if (uniform(random) < 0.2) held = tail;
        }
        return base * factor;
      });
      alarms += static_cast<int>(job.lines.size());
      for (const auto& line : job.lines) ADD_FAILURE() << ranks << " ranks, " << base << " ms: " << line;
    }
  EXPECT_EQ(alarms, 0);
  EXPECT_GT(long_steps, 10'000) << "the noise is one";
}

// With that noise a rank that is really slow is found, though it may take a few more steps.
TEST(StragglerDetector, finds_a_slow_rank_in_noise) {
  std::mt19937_64 random(5);
  std::uniform_real_distribution<double> uniform(1e-9, 1);
  std::lognormal_distribution<double> spread(0, 0.15);
  Job job(4);
  auto busy = [&](int rank, std::int64_t step) {
    const double noise = uniform(random) < 0.05 ? std::min(50.0, 1 / uniform(random)) : 1;
    return 20 * spread(random) * noise * (rank == 1 && step >= 1000 ? 5 : 1);
  };
  job.run(1015, busy);
  ASSERT_THAT(job.lines, SizeIs(1));
  EXPECT_THAT(job.lines[0], HasSubstr("rank 1 is slow"));
  EXPECT_LE(job.told_at[0], 1010);
}

TEST(StragglerDetector, has_what_the_status_shows) {
  Job job(4);
  EXPECT_FALSE(job.detector.status());
  job.run(30, [](int rank, std::int64_t) { return rank == 3 ? 99 : 49.5; });
  const auto status = job.detector.status();
  ASSERT_TRUE(status);
  EXPECT_NEAR(status->steps_per_second, 10, 0.1);
  EXPECT_EQ(status->slowest, 3);
  EXPECT_NEAR(status->slowness, 2, 0.01);
  EXPECT_NEAR(status->waiting, (3 * 50.5 + 1) / 400, 0.01);
}

}  // namespace
}  // namespace lockstep::control

// Pipeline schedules: their published properties, and the errors for invalid ones.
#include <lockstep/schedule/schedule.h>

#include <random>

#include <fmt/format.h>
#include <lockstep/base/error.h>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

using enum PipelineOp;
using ::testing::AllOf;
using ::testing::HasSubstr;

// "0F0 0F1 | 1F0": '|' separates ranks.
PipelineSchedule read(std::string text) {
  for (char& letter : text) letter = letter == ' ' ? ',' : letter == '|' ? '\n' : letter;
  return schedule_from_csv(text, "given");
}

std::string problem_of(const std::string& text) {
  return error_of<ConfigError>([&] { check_schedule(read(text)); });
}

SimulatedSchedule run(const std::string& name, int p, int m, int v = 0) {
  const auto schedule = make_schedule(name, {.ranks = p, .microbatches = m, .stages_per_rank = v});
  check_schedule(schedule);
  return simulate_schedule(schedule);
}

TEST(Schedule, is_what_it_is_called) {
  auto csv = [](const char* name, int p, int m) {
    return to_csv(make_schedule(name, {.ranks = p, .microbatches = m}));
  };
  EXPECT_EQ(csv("gpipe", 2, 2), "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n");
  EXPECT_EQ(csv("1f1b", 2, 3), "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n");
  EXPECT_EQ(csv("zbh1", 2, 3), "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2\n");
  EXPECT_EQ(csv("loopedbfs", 2, 2), "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3F1,3B0,3B1,1B0,1B1\n");
  EXPECT_EQ(make_schedule("zbv", {.ranks = 3, .microbatches = 6}).rank_of_stage,
            (std::vector{0, 1, 2, 2, 1, 0}));
}

TEST(Schedule, idles_as_much_as_was_published) {
  for (const int p : {2, 3, 4, 8})
    for (const int m : {8, 16, 24}) {
      const double idle = p - 1;
      EXPECT_NEAR(run("gpipe", p, m).bubble, idle / (m + idle), 1e-12) << p << " " << m;
      EXPECT_NEAR(run("1f1b", p, m).bubble, idle / (m + idle), 1e-12) << p << " " << m;
      EXPECT_NEAR(run("zbh1", p, m).bubble, idle / (3 * m + idle), 1e-12) << p << " " << m;
      if (m >= 2 * p) {
        EXPECT_NEAR(run("zbv", p, m).bubble, idle / (6 * m + idle), 1e-12) << p << " " << m;
        EXPECT_NEAR(run("zbv", p, m).bubble_inside, 0, 1e-12) << p << " " << m;
      }
      // With v stages per rank, the idle time is that of one of the stages.
      if (m % p == 0) {
        EXPECT_NEAR(run("interleaved1f1b", p, m, 2).bubble, idle / (2 * m + idle), 1e-12) << p << " " << m;
      }
    }
}

TEST(Schedule, holds_as_many_activations_as_was_published) {
  for (const int p : {2, 3, 4, 8}) {
    const int m = 2 * p + 3;
    std::vector<int> one_by_one, of_h1(static_cast<std::size_t>(p), p),
        of_v(static_cast<std::size_t>(p), 2 * p);
    for (int r = 0; r < p; ++r) one_by_one.push_back(p - r);
    EXPECT_EQ(run("gpipe", p, m).peak_activations, std::vector<int>(static_cast<std::size_t>(p), m));
    EXPECT_EQ(run("1f1b", p, m).peak_activations, one_by_one);
    EXPECT_EQ(run("zbh1", p, m).peak_activations, of_h1);
    EXPECT_EQ(run("zbv", p, m).peak_activations, of_v);
    for (const int peak : run("dualpipev", p, m).peak_activations) EXPECT_LE(peak, 2 * p + 1);
  }
}

TEST(Schedule, every_generated_one_passes_the_check_with_and_without_transfers) {
  std::mt19937 random(1);
  int made = 0;
  for (int k = 0; k < 600; ++k) {
    const auto& name = schedule_names()[random() % schedule_names().size()];
    const int p = 1 + static_cast<int>(random() % 9), m = 1 + static_cast<int>(random() % 25);
    const bool any = name == "interleaved1f1b" || name == "loopedbfs";
    const ScheduleOptions options{p, m, any ? 1 + static_cast<int>(random() % 4) : 0};
    PipelineSchedule schedule;
    try {
      schedule = make_schedule(name, options);
    } catch (const ConfigError& error) {
      EXPECT_TRUE(name == "interleaved1f1b" || name == "dualpipev") << error.what();
      continue;
    }
    ++made;
    SCOPED_TRACE(fmt::format("{} {} {} {}", name, p, m, options.stages_per_rank));
    ASSERT_NO_THROW(check_schedule(schedule));
    const auto with = with_transfers(schedule);
    ASSERT_NO_THROW(check_schedule(with));
    const ActionTimes times{1.3, 0.9, 1.1, 0.2};
    EXPECT_NEAR(simulate_schedule(schedule, times).makespan, simulate_schedule(with, times).makespan, 1e-9);
    auto again = schedule_from_csv(to_csv(with), name);
    EXPECT_EQ(again, with);
  }
  EXPECT_GT(made, 400);
}

TEST(Schedule, takes_the_time_that_its_actions_take) {
  const auto schedule = make_schedule("1f1b", {.ranks = 2, .microbatches = 2});
  const auto run =
      simulate_schedule(schedule, {.forward = 1, .input_backward = 2, .weight_backward = 3, .transfer = 10});
  // 0F0 1 | transfer 10 | 1F0 12, 1B0 17 | transfer | 0B0 27..32; 1F1 18, 1B1 23 | transfer | 0B1 33..38
  EXPECT_EQ(run.ends[1], (std::vector<double>{12, 17, 18, 23}));
  EXPECT_EQ(run.ends[0], (std::vector<double>{1, 2, 32, 38}));
  EXPECT_EQ(run.makespan, 38);
  EXPECT_THAT(error_of<ConfigError>([&] { simulate_schedule(schedule, {.forward = -1}); }), HasSubstr("-1"));
}

TEST(Schedule, a_wrong_one_is_refused_with_the_actions_that_disagree) {
  EXPECT_NO_THROW(check_schedule(read("0F0 0F1 0B0 0B1|1F0 1B0 1F1 1B1")));
  EXPECT_THAT(problem_of("0F0 0F1 0B0 0B1|1F0 1B0 1B1"), HasSubstr("lacks 1F1 on rank 1"));
  EXPECT_THAT(problem_of("0F0 0F1 0B0 0B1|1F0 1F1 1F1 1B0 1B1"),
              HasSubstr("1F1 appears twice, as action 2 of rank 1 and as action 3 of rank 1"));
  EXPECT_THAT(problem_of("0F0 0F1 0B0 0B1|1B0 1F0 1F1 1B1"),
              HasSubstr("1B0, action 1 of rank 1, comes before 1F0, action 2 of rank 1, which it needs"));
  EXPECT_THAT(problem_of("0F0 0B0 0F1 0B1|1F0 1F1 1B0 1B1"),
              AllOf(HasSubstr("deadlocks"), HasSubstr("rank 0 waits in 0B0 for 1B0, action 3 of rank 1"),
                    HasSubstr("rank 1 waits in 1F1 for 0F1, action 3 of rank 0")));
  EXPECT_THAT(problem_of("0F0 0B0 0I0 0W0"),
              HasSubstr("0I0, action 3 of rank 0, is part of 0B0, action 2 of rank 0"));
  EXPECT_THAT(problem_of("0F0 0I0"), HasSubstr("lacks 0W0"));
  EXPECT_THAT(problem_of("0F0 0W0 0I0"), HasSubstr("0W0, action 2 of rank 0, comes before 0I0"));
}

TEST(Schedule, transfers_are_complete_and_between_ranks) {
  const std::string good = "0F0 0SEND_F0 0RECV_B0 0B0|1RECV_F0 1F0 1B0 1SEND_B0";
  EXPECT_NO_THROW(check_schedule(read(good)));
  EXPECT_EQ(with_transfers(read("0F0 0B0|1F0 1B0")), read(good));
  EXPECT_THAT(error_of<ConfigError>([&] { with_transfers(read(good)); }), HasSubstr("already"));
  EXPECT_THAT(problem_of("0F0 0SEND_F0 0B0|1RECV_F0 1F0 1B0 1SEND_B0"), HasSubstr("lacks 0RECV_B0"));
  EXPECT_THAT(problem_of("0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0"),
              HasSubstr("is a transfer between stages of one rank"));
  EXPECT_THAT(problem_of("0RECV_F0 0F0 0B0"), HasSubstr("there is no stage before it"));
  EXPECT_THAT(problem_of("0RECV_B0 0F0 0SEND_F0 0B0|1RECV_F0 1F0 1B0 1SEND_B0"),
              AllOf(HasSubstr("rank 0 waits in 0RECV_B0 for 1SEND_B0"),
                    HasSubstr("rank 1 waits in 1RECV_F0 for 0SEND_F0")));
}

TEST(Schedule, pytorchs_form_is_read) {
  const auto schedule = schedule_from_csv("0F0, 0F1,,,0B0 ,,0B1\r\n,1F0,1B0,1F1,1B1\n");
  EXPECT_EQ(to_csv(schedule), "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
  EXPECT_EQ(schedule.microbatches, 2);
  for (const char* wrong : {"0X0", "F0", "0F", "0F0x", "-1F0", "0F-1", "99999999999F0", "0SEND0"})
    EXPECT_THAT(error_of<ConfigError>([&] { schedule_from_csv(std::string("0F0,") + wrong); }),
                AllOf(HasSubstr("line 1, cell 2"), HasSubstr(wrong)));
  EXPECT_THAT(error_of<ConfigError>([] { schedule_from_csv("0F0\n0B0"); }),
              HasSubstr("stage 0 is also on line 1"));
  EXPECT_THAT(error_of<ConfigError>([] { schedule_from_csv("0F0\n2F0"); }),
              HasSubstr("stage 2 but no stage 1"));
  EXPECT_THAT(error_of<ConfigError>([] { schedule_from_csv("\n"); }), HasSubstr("no actions"));
}

TEST(Schedule, numbers_that_it_cannot_have_are_told) {
  EXPECT_THAT(error_of<ConfigError>([] { make_schedule("2f2b", {}); }),
              AllOf(HasSubstr("'2f2b'"), HasSubstr("zbh1")));
  EXPECT_THAT(error_of<ConfigError>([] { make_schedule("1f1b", {.ranks = 0}); }), HasSubstr("0 ranks"));
  EXPECT_THAT(error_of<ConfigError>(
                  [] { make_schedule("1f1b", {.ranks = 2, .microbatches = 2, .stages_per_rank = 2}); }),
              HasSubstr("'1f1b': expected 1 stage per rank, got 2"));
  EXPECT_THAT(
      error_of<ConfigError>([] { make_schedule("interleaved1f1b", {.ranks = 2, .microbatches = 5}); }),
      HasSubstr("2 rounds"));
  EXPECT_THAT(error_of<ConfigError>([] { make_schedule("dualpipev", {.ranks = 4, .microbatches = 7}); }),
              HasSubstr("expected at least 8 micro-batches on 4 ranks, got 7"));
}

TEST(Schedule, is_simulated_with_measured_times) {
  // Two ranks, one micro-batch: each rank waits while the other computes.
  const auto schedule = make_schedule("gpipe", {.ranks = 2, .microbatches = 1});
  const auto run = replay_schedule(schedule, {{2, 5}, {3, 4}});
  EXPECT_DOUBLE_EQ(run.makespan, 14);
  EXPECT_DOUBLE_EQ(run.bubble, 0.5);
  EXPECT_THAT(error_of<ConfigError>([&] { replay_schedule(schedule, {{2, 5}}); }),
              HasSubstr("durations of 1 ranks"));
  EXPECT_THAT(error_of<ConfigError>([&] { replay_schedule(schedule, {{2, 5}, {3}}); }),
              HasSubstr("has 2 actions"));
  EXPECT_THAT(error_of<ConfigError>([&] { replay_schedule(schedule, {{2, 5}, {3, -1}}); }), HasSubstr("-1"));
}

}  // namespace
}  // namespace lockstep::testing

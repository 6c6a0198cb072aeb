// Ranks that wait for each other in two groups: the job ends at once instead of 30 minutes later.
#include "support/errors.h"
#include "support/process.h"

namespace lockstep::testing {
namespace {

Outcome run_deadlock_probe(const std::string& mode) {
  return run({{LOCKSTEP_PROGRAM, "run", "-q", "-n", "3", "--timeout", "10m", "--flight-record", "none",
               LOCKSTEP_DEADLOCK_PROBE, mode}});
}

TEST(Deadlock, across_groups_is_ended_and_shows_both_sides) {
  const auto outcome = run_deadlock_probe("opposite");
  EXPECT_NE(outcome.status, 0);
  EXPECT_THAT(
      outcome.output,
      AllOf(ContainsRegex("lockstep: deadlock: rank 0 \\(pid [0-9]+\\) waits for rank 1 in all_reduce #0 of "
                          "group 'second' at [^ ]*deadlock_probe.cpp:[0-9]+; rank 1 \\(pid [0-9]+\\) waits "
                          "for rank 0 in all_reduce #0 of group 'world' at [^ ]*deadlock_probe.cpp:[0-9]+"),
            Not(HasSubstr(" ended\n"))));
}

// Gloo compares no calls.
TEST(Deadlock, in_one_group_is_a_mismatch_and_shows_both_calls) {
  const auto outcome = run({{LOCKSTEP_PROGRAM, "run", "-q", "-n", "3", "--timeout", "10m", "--flight-record",
                             "none", "env", "LOCKSTEP_BACKEND=gloo", LOCKSTEP_DEADLOCK_PROBE, "differ"}});
  EXPECT_NE(outcome.status, 0);
  EXPECT_THAT(
      outcome.output,
      AllOf(ContainsRegex(
                "lockstep: the ranks' calls differ in operation: rank 0 \\(pid [0-9]+\\) waits in all_reduce "
                "#0 of group 'world' at [^ ]*deadlock_probe.cpp:[0-9]+, rank 1 \\(pid [0-9]+\\) in "
                "broadcast #0 of group 'world' at [^ ]*deadlock_probe.cpp:[0-9]+"),
            HasSubstr("rank 0: mismatch"), HasSubstr("rank 1: mismatch"), HasSubstr("rank 2: mismatch")));
}

TEST(Deadlock, is_none_where_the_operation_was_issued_without_waiting) {
  const auto outcome = run_deadlock_probe("issued");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
}

TEST(Deadlock, is_none_where_another_thread_comes_to_it_later) {
  const auto outcome = run_deadlock_probe("thread");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
}

TEST(Deadlock, is_none_where_a_thread_that_has_issued_nothing_yet_comes_to_it_later) {
  // Some kernels hide what a thread waits for.
  const auto sleeper = run({{"sh", "-c", "sleep 100 & sleep 0.5; cat /proc/$!/wchan; kill $!"}});
  if (sleeper.output.find("sleep") == std::string::npos) GTEST_SKIP() << "wchan: " << sleeper.output;
  const auto outcome = run_deadlock_probe("fresh");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
}

}  // namespace
}  // namespace lockstep::testing

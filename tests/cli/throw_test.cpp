// What the user sees of uncaught exceptions: the culprit once, with its text once.
#include "support/errors.h"
#include "support/process.h"

namespace lockstep::testing {
namespace {

Outcome run_throw_probe(const std::string& mode) {
  return run(
      {{LOCKSTEP_PROGRAM, "run", "-q", "-n", "4", "--flight-record", "none", LOCKSTEP_THROW_PROBE, mode}});
}

// The other ranks, in one line. On a slow machine they may be terminated before their own exceptions end
// them.
const std::string kFollowers = "(lockstep: [1-3] ranks? then ended with an exception: [0-3, ]+\n)?$";

int occurrences(const std::string& text, const std::string& part) {
  int count = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++count;
  return count;
}

TEST(Throw, an_exception_of_one_rank_is_shown_once) {
  const auto outcome = run_throw_probe("runtime");
  EXPECT_EQ(outcome.status, 134);
  EXPECT_THAT(outcome.output,
              ContainsRegex(std::string("^lockstep: rank 1 \\(pid [0-9]+\\) threw: the loss is not finite, "
                                        "after all_reduce #0 of [^\n]*\n") +
                            kFollowers));
}

TEST(Throw, the_same_exception_of_all_ranks_is_shown_once) {
  const auto outcome = run_throw_probe("config");
  EXPECT_EQ(outcome.status, 134);
  EXPECT_THAT(
      outcome.output,
      ContainsRegex(std::string("^lockstep: rank [0-3] \\(pid [0-9]+\\) threw: batch_size: expected at "
                                "least 1, got 0, after all_reduce #0 of [^\n]*\n") +
                    kFollowers));
}

TEST(Throw, a_failed_operation_is_shown_once) {
  const auto outcome = run_throw_probe("comm");
  EXPECT_EQ(occurrences(outcome.output, "not complete within"), 1) << outcome.output;
  EXPECT_THAT(outcome.output,
              ContainsRegex("lockstep: rank [023] \\(pid [0-9]+\\) threw: all_reduce #1 on group 'world'"));
  EXPECT_EQ(occurrences(outcome.output, "terminate called"), 0) << outcome.output;
}

TEST(Throw, ranks_that_leave_because_of_another_say_nothing) {
  const auto outcome = run_throw_probe("caught");
  EXPECT_EQ(occurrences(outcome.output, "leaves the job because of an exception"), 1) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("lockstep: rank 1 (pid "));
}

}  // namespace
}  // namespace lockstep::testing

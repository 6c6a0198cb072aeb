// When `lockstep run --max-restarts` considers two failures the same.
#include "support/errors.h"
#include "support/folder.h"
#include "support/process.h"

namespace lockstep::testing {
namespace {

Outcome run_restart_probe(const std::string& file) {
  return run({{LOCKSTEP_PROGRAM, "run", "-q", "-n", "2", "--max-restarts", "3", "--flight-record", "none",
               LOCKSTEP_RESTART_PROBE, file, "5"}});
}

TEST(Restart, at_the_same_count_twice_goes_on_where_checkpoints_were_saved_between) {
  const Folder folder;
  const auto outcome = run_restart_probe(folder / "checkpoint");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("[0] 20 steps done\n"));
}

TEST(Restart, at_the_same_count_twice_ends_the_job_where_nothing_was_saved) {
  const auto outcome = run_restart_probe("none");
  EXPECT_EQ(outcome.status, 137) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("attempts 0 and 1 failed in the same way"));
}

}  // namespace
}  // namespace lockstep::testing

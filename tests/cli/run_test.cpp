// The program `lockstep`.
#include <chrono>

#include "support/errors.h"
#include "support/process.h"

namespace lockstep::testing {
namespace {

Outcome lockstep_run(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), LOCKSTEP_PROGRAM);
  return run({arguments});
}

Outcome shell(const std::string& ranks, const std::string& script) {
  return lockstep_run({"run", "-n", ranks, "sh", "-c", script});
}

TEST(Run, ranks_find_torchruns_variables) {
  const auto outcome =
      shell("3", "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR:${MASTER_PORT:+port}");
  EXPECT_EQ(outcome.status, 0);
  for (const char* rank : {"0", "1", "2"})
    EXPECT_THAT(outcome.output, HasSubstr(std::string(rank) + "/3 " + rank + "/3 127.0.0.1:port\n"));
}

TEST(Run, what_follows_the_program_belongs_to_it) {
  const auto outcome = lockstep_run({"run", "-n", "1", "echo", "-n", "5", "--threads", "--help"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.output, "5 --threads --help");
}

TEST(Run, a_separator_may_stand_before_the_program) {
  const auto outcome = lockstep_run({"run", "-n", "1", "--threads", "2", "--", "echo", "--", "x"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.output, "-- x\n");
}

TEST(Run, ignored_signals_stay_ignored) {
  const auto outcome =
      run({{"sh", "-c",
            std::string("trap '' HUP; ") + LOCKSTEP_PROGRAM +
                " run -n 2 sh -c 'sleep 1; echo survived' & sleep 0.5; kill -HUP $!; wait $!"}});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.output, "survived\nsurvived\n");
}

TEST(Run, what_a_rank_started_ends_with_it) {
  const auto outcome = shell("2", "[ $RANK = 0 ] && { sleep 0.3; exit 4; }; sleep 41.5; true");
  EXPECT_EQ(outcome.status, 4);
  EXPECT_NE(run({{"pgrep", "-f", "^sleep 41.5"}}).status, 0);
}

TEST(Run, a_second_signal_kills_at_once) {
  const auto outcome = run({{"bash", "-c",
                             std::string(LOCKSTEP_PROGRAM) +
                                 " run -n 2 sh -c 'trap \"\" TERM; while :; do sleep 1; done' & sleep 0.5; "
                                 "kill $!; sleep 0.3; kill $!; wait $!"}});
  EXPECT_EQ(outcome.status, 143);
  EXPECT_LT(outcome.seconds, 4);
}

TEST(Run, the_first_failure_is_told_and_its_status_returned) {
  const auto outcome = shell("3", "[ $RANK = 1 ] && exit 7; exec sleep 30");
  EXPECT_EQ(outcome.status, 7);
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("rank 1 (pid "), HasSubstr("exit status 7"),
                                    Not(HasSubstr("rank 0")), Not(HasSubstr("rank 2"))));
  EXPECT_LT(outcome.seconds, 10);
}

TEST(Run, a_signal_is_named) {
  const auto outcome = shell("2", "[ $RANK = 1 ] && kill -9 $$; exec sleep 30");
  EXPECT_EQ(outcome.status, 137);
  EXPECT_THAT(outcome.output, HasSubstr("signal 9 (SIGKILL)"));
}

TEST(Run, a_rank_that_ignores_sigterm_is_killed_after_the_grace) {
  const auto outcome = shell("2", "[ $RANK = 1 ] && exit 1; trap '' TERM; while :; do sleep 1; done");
  EXPECT_EQ(outcome.status, 1);
  EXPECT_LT(outcome.seconds, 20);
}

TEST(Run, threads_are_shared_out_or_given) {
  EXPECT_EQ(lockstep_run({"run", "-n", "1", "--threads", "3", "sh", "-c", "echo $OMP_NUM_THREADS"}).output,
            "3\n");
  EXPECT_EQ(lockstep_run({"run", "-n", "512", "--threads", "0", "true"}).status, 2);
}

TEST(Run, a_program_that_cannot_be_started_is_named) {
  const auto outcome = lockstep_run({"run", "-n", "2", "./no-such-program"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("'./no-such-program'"), HasSubstr("No such file")));
}

TEST(Run, misuse_is_explained) {
  EXPECT_THAT(lockstep_run({}).output, HasSubstr("subcommand"));
  EXPECT_EQ(lockstep_run({}).status, 2);
  EXPECT_THAT(lockstep_run({"run", "true"}).output, HasSubstr("-n"));
  EXPECT_THAT(lockstep_run({"run", "-n", "2"}).output, HasSubstr("which program"));
  EXPECT_THAT(lockstep_run({"run", "-n", "2", "--wibble", "x"}).output, HasSubstr("--wibble"));
  EXPECT_THAT(lockstep_run({"run", "-n", "0", "true"}).output, HasSubstr("0"));
  EXPECT_EQ(lockstep_run({"run", "-n", "many", "true"}).status, 2);
}

TEST(Run, help_names_every_option) {
  const auto outcome = lockstep_run({"run", "--help"});
  EXPECT_EQ(outcome.status, 0);
  for (const char* option : {"-n,--nproc", "--threads", "PROGRAM", "Example:"})
    EXPECT_THAT(outcome.output, HasSubstr(option));
  EXPECT_THAT(lockstep_run({"--version"}).output, HasSubstr("lockstep 0."));
}

}  // namespace
}  // namespace lockstep::testing

// `lockstep run` for several hosts, all of which are this one.
#include <signal.h>
#include <unistd.h>

#include <filesystem>

#include "cli/session.h"
#include "support/errors.h"
#include "support/folder.h"
#include "support/process.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;

const std::string kProgram = LOCKSTEP_PROGRAM;

class Hosts : public ::testing::Test {
 protected:
  Hosts() { EXPECT_EQ(run({{"sh", "-c", "umask 077; " + kProgram + " key > " + word(key_)}}).status, 0); }

  std::vector<std::string> node(int number, int ranks, const std::string& script,
                                const std::vector<std::string>& options = {}) const {
    std::vector<std::string> all = {kProgram,
                                    "run",
                                    "-q",
                                    "-n",
                                    std::to_string(ranks),
                                    "--nnodes",
                                    "2",
                                    "--node-rank",
                                    std::to_string(number),
                                    "--master",
                                    master_,
                                    "--key-file",
                                    key_};
    all.insert(all.end(), options.begin(), options.end());
    all.insert(all.end(), {"bash", "-c", script});
    return all;
  }

  const Folder folder_;
  const fs::path key_ = folder_ / "job.key";
  std::string master_ = "127.0.0.1:" + std::to_string(free_port());
};

TEST_F(Hosts, ranks_are_numbered_across_hosts) {
  const auto script =
      "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR $MASTER_PORT";
  const auto outcomes = run_together({{node(0, 2, script)}, {node(1, 3, script)}});
  const auto port = std::to_string(std::stoi(master_.substr(master_.find(':') + 1)) + 1);
  for (int rank = 0; rank < 5; ++rank) {
    const int host = rank < 2 ? 0 : 1;
    const auto& outcome = outcomes[static_cast<std::size_t>(host)];
    EXPECT_EQ(outcome.status, 0) << outcome.output;
    const auto r = std::to_string(rank), local = std::to_string(rank - 2 * host);
    EXPECT_THAT(outcome.output, HasSubstr("[" + r + "] " + r + "/5 " + local + (host == 0 ? "/2 0" : "/3 1") +
                                          " 127.0.0.1 " + port + "\n"));
  }
}

TEST_F(Hosts, a_failure_on_one_ends_both) {
  const auto script = "[ $RANK = 3 ] && { echo last words; exit 6; }; exec sleep 300";
  const auto outcomes = run_together({{node(0, 2, script)}, {node(1, 2, script)}});
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.status, 6) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr("lockstep: rank 3 (pid "));
  }
  EXPECT_THAT(outcomes[1].output, HasSubstr("    last words\n"));
  EXPECT_THAT(outcomes[0].output, Not(HasSubstr("last words")));
}

TEST_F(Hosts, a_signal_to_one_ends_both) {
  const auto script = "trap 'echo saved; exit 0' TERM; echo begun; while :; do sleep 0.1; done";
  Session first(node(0, 1, script, {"--prefix", "always"})),
      second(node(1, 1, script, {"--prefix", "always"}));
  ASSERT_TRUE(first.wait_for("begun") && second.wait_for("begun")) << first.output() << second.output();
  second.send(SIGTERM);
  EXPECT_EQ(second.wait(), 143) << second.output();
  EXPECT_EQ(first.wait(), 143) << first.output();
  EXPECT_THAT(first.output(), HasSubstr("[0] saved\n"));
  EXPECT_THAT(second.output(), HasSubstr("[1] saved\n"));
}

TEST_F(Hosts, a_killed_launcher_is_the_end_of_its_host_and_not_of_a_rank) {
  const auto script = "echo begun; exec sleep 300";
  for (const int killed : {0, 1}) {
    Session first(node(0, 1, script)), second(node(1, 2, script));
    ASSERT_TRUE(first.wait_for("begun") && second.wait_for("begun")) << first.output() << second.output();
    Session& other = killed == 0 ? second : first;
    (killed == 0 ? first : second).send(SIGKILL);
    EXPECT_NE(other.wait(), 0);
    EXPECT_THAT(other.output(),
                AllOf(HasSubstr(killed == 0 ? "the coordinator of the job at " + master_ + " is lost"
                                            : "the host at 127.0.0.1 with ranks 1, 2 is lost"),
                      HasSubstr("is lost: its lockstep run has ended\n"), Not(HasSubstr("(pid "))));
  }
}

TEST_F(Hosts, all_start_again_after_a_failure) {
  const Sign begun;
  const auto script =
      "echo attempt $LOCKSTEP_RESTART_COUNT; [ $LOCKSTEP_RESTART_COUNT = 1 ] && exit 0; "
      "[ $RANK = 1 ] && { " +
      begun.await() + "; exit 5; }; " + begun.give() + "; exec sleep 300";
  const auto outcomes = run_together(
      {{node(0, 1, script, {"--max-restarts", "1"})}, {node(1, 1, script, {"--max-restarts", "1"})}});
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.status, 0) << outcome.output;
    EXPECT_THAT(outcome.output, AllOf(HasSubstr("attempt 0\n"), HasSubstr("attempt 1\n")));
  }
}

TEST_F(Hosts, one_that_does_not_come_is_missed) {
  const auto outcome = run({node(0, 1, "true", {"--join-timeout", "1s"})});
  EXPECT_NE(outcome.status, 0);
  EXPECT_THAT(outcome.output, HasSubstr("these did not join within 1.0 s: 1"));
}

TEST_F(Hosts, an_interrupt_while_others_are_awaited_ends_it) {
  const auto marker = unique_marker();
  auto command = node(0, 1, "true");
  command.push_back(marker);
  command.erase(command.begin() + 2);  // Not quiet.
  Session session(command);
  ASSERT_TRUE(session.wait_for("coordinator at " + master_)) << session.output();
  session.send(SIGINT);
  EXPECT_EQ(session.wait(), 130) << session.output();
}

}  // namespace
}  // namespace lockstep::testing

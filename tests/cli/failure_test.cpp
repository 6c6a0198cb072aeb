// How `lockstep run` handles failing ranks, and requests to end the job.
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "cli/session.h"
#include "support/errors.h"
#include "support/folder.h"
#include "support/process.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> command(const std::vector<std::string>& options, const std::string& script) {
  std::vector<std::string> all = {LOCKSTEP_PROGRAM, "run", "--quiet"};
  all.insert(all.end(), options.begin(), options.end());
  all.insert(all.end(), {"bash", "-c", script});
  return all;
}

Outcome shell(const char* ranks, const std::string& script) { return run({command({"-n", ranks}, script)}); }

TEST(Failure, the_first_is_told_and_its_status_returned) {
  const auto outcome = shell("3", "[ $RANK = 1 ] && exit 7; exec sleep 300");
  EXPECT_EQ(outcome.status, 7);
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("lockstep: rank 1 (pid "), HasSubstr("exited with status 7"),
                                    Not(HasSubstr("rank 0")), Not(HasSubstr("rank 2"))));
}

TEST(Failure, a_signal_is_named) {
  const auto outcome = shell("2", "[ $RANK = 1 ] && kill -9 $$; exec sleep 300");
  EXPECT_EQ(outcome.status, 137);
  EXPECT_THAT(outcome.output, HasSubstr("was killed by signal 9 (SIGKILL)"));
}

TEST(Failure, a_rank_that_exits_with_0_is_none) {
  EXPECT_EQ(shell("3", "[ $RANK = 1 ] && sleep 0.3; exit 0").status, 0);
}

TEST(Failure, the_last_lines_of_the_rank_are_shown) {
  const auto outcome =
      run({command({"-n", "2", "--show", "none"},
                   "[ $RANK = 0 ] && exec sleep 300\n"
                   "for i in $(seq 50); do echo line $i; done; printf 'last words' >&2; kill -9 $$")});
  EXPECT_EQ(outcome.status, 137);
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("lines of rank 1:\n"), HasSubstr("\n    line 50\n"),
                                    HasSubstr("    last words\n"), Not(HasSubstr("line 29\n"))));
  EXPECT_LT(outcome.output.find("SIGKILL"), outcome.output.find("line 50"));
}

TEST(Failure, a_rank_that_ignores_sigterm_is_killed_after_the_grace) {
  const Sign ready;
  const auto outcome = run({command({"-n", "2", "--grace", "500ms"},
                                    "[ $RANK = 1 ] && { " + ready.await() + "; exit 1; }; trap '' TERM; " +
                                        ready.give() + "; while :; do sleep 1; done")});
  EXPECT_EQ(outcome.status, 1);
}

TEST(Failure, ranks_have_time_to_say_why_they_end) {
  const Sign ready;
  const auto outcome =
      shell("2", "[ $RANK = 1 ] && { " + ready.await() + "; exit 1; }\n" +
                     "trap 'echo saved; exit 0' TERM; " + ready.give() + "; while :; do sleep 0.1; done");
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.output, HasSubstr("[0] saved\n"));
}

TEST(Failure, a_stopped_rank_does_not_hold_up_the_end) {
  const Folder folder;
  const auto pid = folder / "pid";
  const auto until_stopped = "until [ -s " + word(pid) + " ] && grep -q '^State:.T' /proc/$(cat " +
                             word(pid) + ")/status; do sleep 0.02; done";
  const auto outcome = run({command(
      {"-n", "2", "--grace", "10m", "--stop-grace", "10m"},
      "[ $RANK = 1 ] && { " + until_stopped + "; exit 3; }; echo $$ > " + word(pid) + "; kill -STOP $$")});
  EXPECT_EQ(outcome.status, 3);
}

TEST(Failure, a_rank_cannot_leave_its_group_and_so_its_signals) {
  // Rank 0 fails once rank 1 has printed its line. If rank 1 were not notified, it would be killed after the
  // grace, with a line.
  const Folder folder;
  const auto outcome = run({{LOCKSTEP_PROGRAM, "run", "-q", "-n", "2", "--grace", "30s", "python3", "-c",
                             "import os, sys, time\n"
                             "try: os.setpgid(0, os.getpgid(os.getppid()))\n"
                             "except PermissionError: print('stays', flush=True)\n"
                             "if os.environ['RANK'] == '1': os.mkdir(sys.argv[1]); time.sleep(300)\n"
                             "while not os.path.exists(sys.argv[1]): time.sleep(0.02)\n"
                             "os._exit(3)",
                             folder / "sign"}});
  EXPECT_EQ(outcome.status, 3);
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("[1] stays\n"), Not(HasSubstr("did not end within"))));
}

TEST(Failure, what_a_rank_started_ends_with_it) {
  const auto marker = unique_marker();
  const Sign started;
  const auto outcome = shell("2", "[ $RANK = 0 ] && { " + started.await() + "; exit 4; }; bash -c '" +
                                      started.give() + "; exec -a " + marker + " sleep 1000'");
  EXPECT_EQ(outcome.status, 4);
  EXPECT_THAT(processes_with(marker), ::testing::IsEmpty());
}

TEST(Failure, ranks_are_started_again) {
  const auto outcome =
      run({command({"-n", "2", "--max-restarts", "2"},
                   "echo attempt $LOCKSTEP_RESTART_COUNT $TORCHELASTIC_RESTART_COUNT\n"
                   "[ $LOCKSTEP_RESTART_COUNT = 1 ] && exit 0; [ $RANK = 1 ] && exit 9; exec sleep 300")});
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("[1] attempt 0 0\n"), HasSubstr("[0] attempt 1 1\n"),
                                    HasSubstr("exited with status 9")));
}

TEST(Failure, out_of_memory_is_told_with_usage_and_limit) {
  const bool unified = fs::exists("/sys/fs/cgroup/cgroup.controllers");
  const fs::path group = fs::path(unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory") /
                         ("lockstep-test-" + std::to_string(::getpid()));
  if (::mkdir(group.c_str(), 0755) != 0) GTEST_SKIP() << "no cgroup can be made in " << group.parent_path();
  std::ofstream limit(group / (unified ? "memory.max" : "memory.limit_in_bytes"));
  limit << (512 << 20) << std::flush;
  if (!limit) {
    ::rmdir(group.c_str());
    GTEST_SKIP() << "memory cannot be limited in " << group;
  }
  const auto inside = "echo $$ > " + word(group / "cgroup.procs") + "; exec \"$@\"";
  std::vector<std::string> all = {"sh", "-c", inside, "sh"};
  const auto job = command({"-n", "2"}, "[ $RANK = 1 ] && exec tail /dev/zero; exec sleep 300");
  all.insert(all.end(), job.begin(), job.end());
  const auto outcome = run({all, {{"ASAN_OPTIONS", "detect_leaks=0"}}});
  EXPECT_TRUE(eventually([&] { return ::rmdir(group.c_str()) == 0; }));
  EXPECT_EQ(outcome.status, 137);
  EXPECT_THAT(outcome.output,
              AllOf(HasSubstr("rank 1 (pid "), HasSubstr("was killed by signal 9 (SIGKILL)"),
                    HasSubstr("out of memory: the cgroup's limit is 512.0 MiB, its highest usage was 51")));
}

TEST(Failure, a_limit_of_processes_is_told_with_what_could_not_be_created) {
  const bool unified = fs::exists("/sys/fs/cgroup/cgroup.controllers");
  const fs::path group = fs::path(unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/pids") /
                         ("lockstep-test-" + std::to_string(::getpid()));
  if (::mkdir(group.c_str(), 0755) != 0) GTEST_SKIP() << "no cgroup can be made in " << group.parent_path();
  const auto inside = "echo $$ > " + (group / "cgroup.procs").string() + "; exec \"$@\"";
  std::vector<std::string> all = {"sh", "-c", inside, "sh"};
  const auto job = command({"-n", "2"}, "exit 0");
  all.insert(all.end(), job.begin(), job.end());
  // Raises the limit by one each time, so that each process and thread in turn is the one that cannot be
  // created.
  int status = -1;
  for (int most = 1; most < 30 && status != 0; ++most) {
    std::ofstream limit(group / "pids.max");
    limit << most << std::flush;
    if (!limit) {
      ::rmdir(group.c_str());
      GTEST_SKIP() << "processes cannot be limited in " << group;
    }
    const auto outcome = run({all, {{"ASAN_OPTIONS", "detect_leaks=0"}}});
    status = outcome.status;
    if (status == 0) break;
    EXPECT_EQ(status, 2) << outcome.output;
    EXPECT_THAT(
        outcome.output,
        ContainsRegex("^lockstep: (the agent's process|a thread for the (ranks' output|agent)|a process for "
                      "a rank) cannot be created \\(the limits are pids.max of the cgroup and ulimit "
                      "-u\\): Resource temporarily unavailable\n$"))
        << most;
  }
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(eventually([&] { return ::rmdir(group.c_str()) == 0; }));
}

// ---- signals
// ------------------------------------------------------------------------------------------------

TEST(Signals, go_to_the_ranks_which_may_save) {
  for (const auto& [signal, name] :
       {std::pair{SIGTERM, "TERM"}, std::pair{SIGINT, "INT"}, std::pair{SIGHUP, "HUP"}}) {
    Session session(command({"-n", "2"}, std::string("trap 'echo saved; exit 0' ") + name +
                                             "; echo ready; while :; do sleep 0.1; done"));
    ASSERT_TRUE(session.wait_for("ready") && session.wait_for("ready")) << session.output();
    session.send(signal);
    EXPECT_EQ(session.wait(), 128 + signal) << session.output();
    EXPECT_THAT(session.output(), AllOf(HasSubstr("[0] saved"), HasSubstr("[1] saved")));
  }
}

TEST(Signals, reach_each_rank_once) {
  Session session(command({"-n", "1", "--grace", "2s"},
                          "trap 'echo got it' INT; echo ready; while :; do sleep 0.1; done"));
  ASSERT_TRUE(session.wait_for("ready"));
  session.send(SIGINT);
  EXPECT_EQ(session.wait(), 130);
  EXPECT_THAT(session.output(),
              ContainsRegex("^ready\ngot it\nlockstep: rank 0 \\(pid [0-9]+\\) did not end within 2 s; "
                            "killing it\n$"));
}

TEST(Signals, a_second_one_kills_at_once) {
  Session session(
      command({"-n", "2", "--grace", "10m"}, "trap 'echo no' TERM; echo ready; while :; do sleep 0.1; done"));
  ASSERT_TRUE(session.wait_for("ready") && session.wait_for("ready"));
  session.send(SIGTERM);
  ASSERT_TRUE(session.wait_for("no"));
  session.send(SIGTERM);
  EXPECT_EQ(session.wait(), 143);
}

TEST(Signals, ranks_that_do_not_end_are_killed_after_the_grace) {
  Session session(
      command({"-n", "2", "--grace", "300ms"}, "trap '' TERM; echo ready; while :; do sleep 0.1; done"));
  ASSERT_TRUE(session.wait_for("ready") && session.wait_for("ready"));
  session.send(SIGTERM);
  EXPECT_EQ(session.wait(), 143);
}

TEST(Signals, one_is_enough_also_where_nobody_reads_the_output) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);  // Inherited by the job, and never read.
  const auto out = "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(ends[1]);
  Session session({"bash", "-c", "exec \"$0\" \"$@\" >" + out, LOCKSTEP_PROGRAM, "run", "-q", "-n", "2",
                   "--grace", "500ms", "yes"});
  // Until the pipe is full: its contents have not grown for a while.
  int before = 0, bytes = 0;
  EXPECT_TRUE(eventually([&] {
    before = bytes;
    ::ioctl(ends[0], FIONREAD, &bytes);
    if (bytes < 4096 || bytes != before) return false;
    ::usleep(100 * 1000);
    return ::ioctl(ends[0], FIONREAD, &bytes) == 0 && bytes == before;
  }));
  session.send(SIGTERM);
  EXPECT_EQ(session.wait(), 143);
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(Signals, that_are_ignored_stay_ignored) {
  const Sign go_on;
  Session session({"bash", "-c",
                   "trap '' HUP; exec " LOCKSTEP_PROGRAM " run -q -n 2 bash -c 'echo ready; " +
                       go_on.await() + "; echo survived'"});
  ASSERT_TRUE(session.wait_for("ready") && session.wait_for("ready"));
  session.send(SIGHUP);
  ::usleep(500 * 1000);  // It would have ended by then.
  go_on.show();
  EXPECT_EQ(session.wait(), 0);
  EXPECT_THAT(session.output(), AllOf(HasSubstr("[0] survived\n"), HasSubstr("[1] survived\n")));
}

TEST(Signals, of_the_users_own_are_passed_on) {
  Session session(
      command({"-n", "2"}, "trap 'echo asked; exit 0' USR1; echo ready; while :; do sleep 0.1; done"));
  ASSERT_TRUE(session.wait_for("ready") && session.wait_for("ready"));
  session.send(SIGUSR1);
  EXPECT_EQ(session.wait(), 0);
  EXPECT_THAT(session.output(), AllOf(HasSubstr("[0] asked"), HasSubstr("[1] asked")));
}

}  // namespace
}  // namespace lockstep::testing

// No process survives the launcher or its agent process, whatever the ranks have started.
#include <signal.h>
#include <unistd.h>

#include "cli/session.h"
#include "support/errors.h"
#include "support/process.h"

namespace lockstep::testing {
namespace {

using ::testing::IsEmpty;

const std::string kProgram = LOCKSTEP_PROGRAM;

// A rank that is a script, with a program in it, a background helper, a daemon that has left the session and
// its parent, and a process that keeps starting more.
std::string script(const std::string& marker, bool ends = false) {
  const auto sleep = "bash -c 'exec -a " + marker + " sleep 1000'";
  return "setsid -f " + sleep + "; (" + sleep + " & ) ; " + sleep + " & " +
         "(setsid bash -c 'while :; do setsid -f sleep 0.5; sleep 0.05; done' " + marker +
         " >/dev/null 2>&1 &); " + "echo begun; " + (ends ? "sleep 1" : sleep);
}

std::vector<std::string> command(const std::string& marker, bool ends = false) {
  return {kProgram, "run", "-q", "-n", "2", "--show", "all", "bash", "-c", script(marker, ends)};
}

bool begin(Session& session) { return session.wait_for("begun") && session.wait_for("begun"); }
bool all_gone(const std::string& marker) {
  return eventually([&] { return processes_with(marker).empty(); });
}

TEST(AgentProcess, a_killed_launcher_takes_everything_with_it) {
  const auto marker = unique_marker();
  Session session(command(marker));
  ASSERT_TRUE(begin(session)) << session.output();
  EXPECT_TRUE(eventually([&] { return processes_with(marker).size() > 8; }));
  session.send(SIGKILL);
  EXPECT_EQ(session.wait(), 137);
  EXPECT_TRUE(all_gone(marker));
}

TEST(AgentProcess, that_is_killed_takes_everything_with_it_also_where_nothing_can_be_said) {
  for (const bool heard : {true, false}) {
    const auto marker = unique_marker();
    auto words = command(marker);
    if (!heard) words.insert(words.begin(), {"bash", "-c", "exec \"$0\" \"$@\" 2>/dev/full"});
    Session session(words);
    ASSERT_TRUE(begin(session)) << session.output();
    const pid_t agent_process = child_named(session.pid(), "lockstep-agent");
    ASSERT_GT(agent_process, 0);
    ::kill(agent_process, SIGKILL);
    EXPECT_EQ(session.wait(), 137);
    EXPECT_THAT(processes_with(marker), IsEmpty());
    const auto told =
        HasSubstr("the agent (pid " + std::to_string(agent_process) + ") was killed by signal 9");
    EXPECT_EQ(::testing::Value(session.output(), told), heard) << session.output();
  }
}

// A job whose agent is stopped; `options` are passed to `lockstep run`.
struct StoppedAgent {
  explicit StoppedAgent(const std::vector<std::string>& options)
      : session([&] {
          auto words = command(marker);
          words.insert(words.begin() + 2, options.begin(), options.end());
          return words;
        }()) {
    if (!begin(session)) return;
    agent_process = child_named(session.pid(), "lockstep-agent");
    if (agent_process > 0) ::kill(agent_process, SIGSTOP);
    stopped = session.wait_for("the agent (pid " + std::to_string(agent_process) + ") is stopped (SIGSTOP)");
  }
  const std::string marker = unique_marker();
  Session session;
  pid_t agent_process = -1;
  bool stopped = false;
};

TEST(AgentProcess, that_is_stopped_is_ended_after_the_grace) {
  StoppedAgent job({"--stop-grace", "300ms"});
  ASSERT_TRUE(job.stopped) << job.session.output();
  EXPECT_EQ(job.session.wait(), 137);
  EXPECT_THAT(processes_with(job.marker), IsEmpty());
  EXPECT_THAT(job.session.output(),
              AllOf(ContainsRegex("was stopped \\(SIGSTOP\\) for [0-9.]+ s, longer than "
                                  "--stop-grace allows; the ranks were terminated"),
                    Not(HasSubstr("resumed after"))));
}

TEST(AgentProcess, that_is_stopped_for_a_moment_goes_on) {
  StoppedAgent job({"--stop-grace", "1h"});
  ASSERT_TRUE(job.stopped) << job.session.output();
  ::kill(job.agent_process, SIGCONT);
  EXPECT_TRUE(job.session.wait_for("resumed after")) << job.session.output();
  EXPECT_EQ(job.session.wait(std::chrono::seconds(0)), -1);
  job.session.send(SIGTERM);
  EXPECT_EQ(job.session.wait(), 143);
  EXPECT_THAT(processes_with(job.marker), IsEmpty());
}

TEST(AgentProcess, that_is_stopped_is_continued_by_a_signal_that_ends_the_job) {
  for (const int signal : {SIGTERM, SIGINT}) {
    StoppedAgent job({"--stop-grace", "1h"});
    ASSERT_TRUE(job.stopped) << job.session.output();
    job.session.send(signal);
    EXPECT_EQ(job.session.wait(), 128 + signal) << job.session.output();
    EXPECT_THAT(processes_with(job.marker), IsEmpty());
  }
}

TEST(AgentProcess, that_is_stopped_again_is_killed_by_the_second_signal) {
  // The ranks ignore the first signal, so that the agent waits for them.
  const auto marker = unique_marker();
  Session session({kProgram, "run", "-q", "-n", "2", "--stop-grace", "1h", "--grace", "1h", "bash", "-c",
                   "trap 'echo got it' TERM; echo begun; while :; do sleep 0.1; done", marker});
  ASSERT_TRUE(begin(session)) << session.output();
  const pid_t agent_process = child_named(session.pid(), "lockstep-agent");
  ASSERT_GT(agent_process, 0);
  session.send(SIGTERM);
  ASSERT_TRUE(session.wait_for("got it")) << session.output();
  ::kill(agent_process, SIGSTOP);
  ASSERT_TRUE(session.wait_for("is stopped (SIGSTOP)")) << session.output();
  session.send(SIGTERM);
  EXPECT_EQ(session.wait(), 137) << session.output();
  EXPECT_THAT(processes_with(marker), IsEmpty());
}

TEST(AgentProcess, that_is_stopped_ends_all_when_the_launcher_is_killed) {
  StoppedAgent job({"--stop-grace", "1h"});
  ASSERT_TRUE(job.stopped) << job.session.output();
  job.session.send(SIGKILL);
  EXPECT_EQ(job.session.wait(), 137);
  EXPECT_TRUE(all_gone(job.marker));
}

TEST(AgentProcess, nothing_is_left_at_the_normal_end) {
  const auto marker = unique_marker();
  Session session(command(marker, true));
  EXPECT_EQ(session.wait(), 0) << session.output();
  EXPECT_THAT(processes_with(marker), IsEmpty());
}

TEST(AgentProcess, nothing_is_left_after_a_failure_or_a_signal) {
  const auto marker = unique_marker();
  EXPECT_EQ(run({{kProgram, "run", "-q", "-n", "2", "bash", "-c", script(marker, true) + "; exit 3"}}).status,
            3);
  EXPECT_THAT(processes_with(marker), IsEmpty());
  Session session(command(marker));
  ASSERT_TRUE(begin(session));
  session.send(SIGTERM);
  EXPECT_EQ(session.wait(), 143);
  EXPECT_THAT(processes_with(marker), IsEmpty());
}

TEST(AgentProcess, a_launcher_killed_at_any_moment_of_the_start_leaves_nothing) {
  const auto marker = unique_marker();
  for (int milliseconds = 0; milliseconds < 400; milliseconds += 20) {
    Session session(command(marker));
    ::usleep(static_cast<useconds_t>(milliseconds) * 1000);
    session.send(SIGKILL);
    session.wait();
  }
  EXPECT_TRUE(all_gone(marker));
}

TEST(AgentProcess, what_a_shell_had_started_before_is_left_alone) {
  const auto marker = unique_marker();
  Session session({"bash", "-c",
                   "setsid bash -c 'exec -a other-" + marker + " sleep 1000' & exec \"$0\" \"$@\"", kProgram,
                   "run", "-q", "-n", "2", "bash", "-c", "echo begun; sleep 1000"});
  ASSERT_TRUE(begin(session));
  const pid_t agent_process = child_named(session.pid(), "lockstep-agent");
  ASSERT_GT(agent_process, 0);
  ::kill(agent_process, SIGKILL);
  EXPECT_EQ(session.wait(), 137);
  const auto left = processes_with("other-" + marker);
  EXPECT_EQ(left.size(), 1u);
  for (pid_t pid : left) ::kill(pid, SIGKILL);
}

TEST(AgentProcess, does_not_start_with_the_processes_of_another_namespace) {
  if (run({{"unshare", "--fork", "--pid", "--mount-proc", "true"}}).status != 0)
    GTEST_SKIP() << "unshare may not make a pid namespace here";
  const auto outcome = run({{"unshare", "--fork", "--pid", kProgram, "run", "-n", "2", "echo", "hi"}});
  EXPECT_EQ(outcome.status, 2) << outcome.output;
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("/proc is of another pid namespace: this process is 1 here"),
                                    HasSubstr("mount -t proc proc /proc")));
  const auto none = run({{"unshare", "--mount", "sh", "-c",
                          "mount -t tmpfs none /proc && exec " + kProgram + " run -n 2 echo hi"}});
#ifdef __SANITIZE_ADDRESS__
  EXPECT_EQ(none.status, 1) << none.output;  // Its leak checker needs /proc, too.
#else
  EXPECT_EQ(none.status, 2) << none.output;
#endif
  EXPECT_THAT(none.output, HasSubstr("no /proc, which is needed"));
}

TEST(AgentProcess, reaps_strangers_as_the_first_process_of_a_container) {
  if (run({{"unshare", "--fork", "--pid", "--mount-proc", "true"}}).status != 0)
    GTEST_SKIP() << "unshare may not make a pid namespace here";
  // Orphans of a process that was started from outside, as by `docker exec`, become children of process 1.
  // The rank counts those that still sleep, or are dead and unreaped, until there are none.
  Session session({"unshare", "--fork", "--pid", "--mount-proc", kProgram, "run", "-q", "-n", "1", "bash",
                   "-c",
                   "echo begun; read x; for i in $(seq 300); do sleep 0.1; "
                   "n=$(ps -A -o stat= -o comm= | grep -cE '^Z|sleep'); [ $n = 0 ] && break; done; "
                   "echo $n; exit 0"});
  ASSERT_TRUE(session.wait_for("begun")) << session.output();
  const pid_t first = child_named(session.pid(), "lockstep");
  ASSERT_GT(first, 0);
  EXPECT_EQ(run({{"nsenter", "--pid", "--mount", "-t", std::to_string(first), "bash", "-c",
                  "for i in 1 2 3; do (sleep 0.2 &); done; exit 0"}})
                .status,
            0);
  session.type("\n");
  ASSERT_TRUE(session.wait_for("0\n")) << session.output();
  EXPECT_EQ(session.wait(), 0);
}

}  // namespace
}  // namespace lockstep::testing

// `lockstep run` on a terminal: colours, Ctrl-C, Ctrl-Z, typed input. It runs below a shell with job control,
// as in normal use.
#include <signal.h>

#include <lockstep/control/agent/process.h>

#include "cli/session.h"
#include "support/errors.h"

namespace lockstep::testing {
namespace {

const std::string kProgram = LOCKSTEP_PROGRAM;

// A shell that prints "ready>" when it waits for a command.
class Terminal {
 public:
  explicit Terminal(std::map<std::string, std::string> environment = {})
      : session_({"bash", "--norc", "--noprofile", "-i"}, with_prompt(std::move(environment))) {
    EXPECT_TRUE(session_.wait_for("ready>"));
  }
  Session* operator->() { return &session_; }

 private:
  static Session::Options with_prompt(std::map<std::string, std::string> environment) {
    environment["PS1"] = "ready>";
    environment["TERM"] = "xterm";
    return {true, std::move(environment)};
  }
  Session session_;
};

char state_of(pid_t pid) {
  const auto process = control::look_at(pid);
  return process ? process->state : '-';
}

TEST(Terminal, shows_each_rank_in_a_colour) {
  Session session({kProgram, "run", "-q", "-n", "2", "sh", "-c", "echo text; echo error >&2"},
                  {.terminal = true});
  EXPECT_EQ(session.wait(), 0);
  EXPECT_THAT(session.output(),
              AllOf(HasSubstr("\033[36m[0]\033[0m text\r\n"), HasSubstr("\033[33m[1]\033[0m text\r\n"),
                    HasSubstr("\033[33m[1]\033[0m error\r\n")));
}

TEST(Terminal, shows_no_colours_to_those_who_do_not_want_them) {
  Session session({kProgram, "run", "-q", "-n", "2", "sh", "-c", "echo text"}, {true, {{"NO_COLOR", "1"}}});
  EXPECT_EQ(session.wait(), 0);
  EXPECT_THAT(session.output(), AllOf(HasSubstr("[0] text\r\n"), Not(HasSubstr("\033"))));
}

TEST(Terminal, that_knows_no_colours_gets_none) {
  Session session({kProgram, "run", "-q", "-n", "2", "sh", "-c", "echo text"}, {true, {{"TERM", "dumb"}}});
  EXPECT_EQ(session.wait(), 0);
  EXPECT_THAT(session.output(), AllOf(HasSubstr("[0] text\r\n"), Not(HasSubstr("\033"))));
}

TEST(Terminal, a_rank_that_wants_it_gets_an_error_and_is_not_stopped) {
  Terminal terminal;
  terminal->type(kProgram +
                 " run -q -n 2 bash -c 'stty -echo </dev/tty; read x </dev/tty; echo rank $RANK en''ded'; "
                 "echo status=$?\n");
  EXPECT_TRUE(terminal->wait_for("ended\r\n") && terminal->wait_for("ended\r\n")) << terminal->output();
  EXPECT_TRUE(terminal->wait_for("status=0\r\n")) << terminal->output();
  EXPECT_THAT(terminal->output(), AllOf(HasSubstr("/dev/tty: No such device"), Not(HasSubstr("SIGSTOP"))));
}

TEST(Terminal, has_colours_only_where_the_stream_goes_there) {
  Session session({"sh", "-c", kProgram + " run -q -n 2 sh -c 'echo out; echo err >&2' | cat"},
                  {.terminal = true});
  EXPECT_EQ(session.wait(), 0);
  EXPECT_THAT(session.output(), AllOf(HasSubstr("[0] out\r\n"), HasSubstr("[0]\033[0m err\r\n")));
}

TEST(Terminal, that_stops_writers_from_behind_does_not_stop_us) {
  Terminal terminal;
  terminal->type("stty tostop; " + kProgram + " run -q -n 2 sh -c 'echo text'; echo status=$?\n");
  EXPECT_TRUE(terminal->wait_for("status=0\r\n")) << terminal->output();
}

TEST(Terminal, ctrl_c_reaches_each_rank_once) {
  Terminal terminal;
  terminal->type(
      kProgram +
      " run -q -n 2 bash -c 'trap \"echo got it; exit 0\" INT; echo begun; while :; do sleep 0.1; done'\n");
  ASSERT_TRUE(terminal->wait_for("begun\r\n") && terminal->wait_for("begun\r\n")) << terminal->output();
  terminal->type("\x03");
  ASSERT_TRUE(terminal->wait_for("got it\r\n") && terminal->wait_for("got it\r\n")) << terminal->output();
  ASSERT_TRUE(terminal->wait_for("ready>"));
  terminal->type("echo status=$?\n");
  EXPECT_TRUE(terminal->wait_for("status=130\r\n")) << terminal->output();
}

TEST(Terminal, ctrl_z_stops_all_ranks_and_fg_continues_them) {
  const auto marker = unique_marker();
  const Sign go_on;
  Terminal terminal;
  terminal->type(kProgram + " run -q -n 2 --stop-grace 1s bash -c 'echo begun; " + go_on.await() +
                 "; echo ended' " + marker + "\n");
  ASSERT_TRUE(terminal->wait_for("begun\r\n") && terminal->wait_for("begun\r\n")) << terminal->output();
  terminal->type("\x1a");
  ASSERT_TRUE(terminal->wait_for("Stopped")) << terminal->output();
  // Two ranks and the launcher; the agent process is awake.
  EXPECT_TRUE(eventually([&] {
    int stopped = 0;
    for (pid_t pid : processes_with(marker)) stopped += state_of(pid) == 'T';
    return stopped >= 3;  // A rank's shell may be about to start a command.
  }));
  // Longer than the grace of a rank that was stopped by another process.
  go_on.show();
  terminal->type("sleep 2; fg\n");
  EXPECT_TRUE(terminal->wait_for("ended\r\n") && terminal->wait_for("ended\r\n")) << terminal->output();
  ASSERT_TRUE(terminal->wait_for("ready>"));
  terminal->type("echo status=$?\n");
  EXPECT_TRUE(terminal->wait_for("status=0\r\n")) << terminal->output();
}

TEST(Terminal, ctrl_z_after_a_failure_holds_up_its_consequences) {
  // Rank 1 does not end when asked to, and would be killed after the grace; then all ranks would restart.
  const Sign deaf;
  Terminal terminal;
  terminal->type(kProgram +
                 " run -q -n 2 --grace 2 --max-restarts 1 bash -c 'trap \"\" TERM; echo at''tempt "
                 "$LOCKSTEP_RESTART_COUNT; [ $LOCKSTEP_RESTART_COUNT = 1 ] && exit 0; [ $RANK = 0 ] && { " +
                 deaf.await() + "; exit 1; }; " + deaf.give() + "; while :; do sleep 0.1; done'\n");
  ASSERT_TRUE(terminal->wait_for("exited with status 1")) << terminal->output();
  terminal->type("\x1a");
  ASSERT_TRUE(terminal->wait_for("Stopped")) << terminal->output();
  terminal->type("sleep 3; echo slept''; fg\n");
  ASSERT_TRUE(terminal->wait_for("slept\r\n")) << terminal->output();
  EXPECT_THAT(terminal->output(), Not(HasSubstr("attempt 1")));
  EXPECT_TRUE(terminal->wait_for("attempt 1\r\n")) << terminal->output();
  ASSERT_TRUE(terminal->wait_for("ready>"));
  terminal->type("echo status=$?\n");
  EXPECT_TRUE(terminal->wait_for("status=0\r\n")) << terminal->output();
}

TEST(Terminal, what_is_typed_goes_to_the_rank) {
  Terminal terminal;
  terminal->type(kProgram +
                 " run -q -n 2 --stdin 1 bash -c 'read a; read b; echo $RANK read $a,$b; cat; echo end'\n");
  terminal->type("one\ntwo\nthree\n");
  EXPECT_TRUE(terminal->wait_for("1 read one,two\r\n")) << terminal->output();
  EXPECT_TRUE(terminal->wait_for("three\r\n")) << terminal->output();
  terminal->type("\x04");
  EXPECT_TRUE(terminal->wait_for("end\r\n")) << terminal->output();
  EXPECT_TRUE(terminal->wait_for("ready>"));
  EXPECT_THAT(terminal->output(), HasSubstr("0 read ,\r\n"));
}

TEST(Terminal, a_job_behind_leaves_the_terminal_to_the_shell) {
  const Sign go_on;
  Terminal terminal;
  terminal->type(kProgram + " run -q -n 2 bash -c 'read a; echo $RANK has read $a; " + go_on.await() +
                 "; echo en''ded' &\n");
  ASSERT_TRUE(terminal->wait_for("1 has read\r\n")) << terminal->output();
  terminal->type("echo typed'' for the shell\n");
  EXPECT_TRUE(terminal->wait_for("typed for the shell\r\n")) << terminal->output();
  go_on.show();
  EXPECT_TRUE(terminal->wait_for("1]\033[0m ended\r\n")) << terminal->output();
  terminal->type("fg\n");
  terminal->type("for the rank\n");
  EXPECT_TRUE(terminal->wait_for("0 has read for the rank\r\n")) << terminal->output();
}

TEST(Terminal, that_is_closed_ends_the_job) {
  const auto marker = unique_marker();
  {
    Session session({kProgram, "run", "-q", "-n", "2", "bash", "-c", "echo begun; sleep 300", marker},
                    {.terminal = true});
    ASSERT_TRUE(session.wait_for("begun") && session.wait_for("begun"));
    session.close_input();
    // A zombie has no arguments.
    EXPECT_TRUE(eventually([&] { return processes_with(marker).size() <= 1; }));
  }
  EXPECT_TRUE(eventually([&] { return processes_with(marker).empty(); }));
}

}  // namespace
}  // namespace lockstep::testing

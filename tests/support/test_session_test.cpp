#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <utility>

#include "support/eventually.h"

namespace lockstep::testing {
namespace {

using ::testing::HasSubstr;

// A shell script under test_session, with its output in a pipe.
class Session {
 public:
  // With a middleman, a shell is the parent of test_session.
  explicit Session(const std::string& script, bool middleman = false, const char* limit = "600") {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) std::abort();
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(ends[1], STDOUT_FILENO);
      ::dup2(ends[1], STDERR_FILENO);
      if (middleman)
        ::execlp("sh", "sh", "-c", "\"$0\" sh -c \"$1\" & wait", LOCKSTEP_TEST_SESSION, script.c_str(),
                 nullptr);
      else
        ::execl(LOCKSTEP_TEST_SESSION, "test_session", "--limit", limit, "sh", "-c", script.c_str(), nullptr);
      ::_exit(99);
    }
    ::close(ends[1]);
    out_ = ::fdopen(ends[0], "r");
  }
  ~Session() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      wait();
    }
    ::fclose(out_);
  }
  Session(const Session&) = delete;

  std::string line() {
    char text[512];
    return ::fgets(text, sizeof text, out_) != nullptr ? text : "";
  }
  pid_t read_pid() { return std::atoi(line().c_str()); }
  void send(int signal) { ::kill(pid_, signal); }
  int wait() {
    int status = 0;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  }

 private:
  pid_t pid_ = -1;
  FILE* out_ = nullptr;
};

bool ends(pid_t pid) {
  return eventually([pid] { return ::kill(pid, 0) != 0; });
}

TEST(TestSession, passes_on_the_status) {
  EXPECT_EQ(Session("exit 7").wait(), 7);
  EXPECT_EQ(Session("kill -USR1 $$").wait(), 128 + SIGUSR1);
}

TEST(TestSession, the_program_leads_a_session_of_its_own) {
  EXPECT_EQ(Session("test $(cut -d ' ' -f 6 /proc/$$/stat) = $$").wait(), 0);
}

TEST(TestSession, forwards_signals) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    Session session("trap 'exit 5' INT TERM HUP; echo ready; while :; do sleep 0.05; done");
    EXPECT_EQ(session.line(), "ready\n");
    session.send(signal);
    EXPECT_EQ(session.wait(), 5) << signal;
  }
}

TEST(TestSession, kills_and_names_a_process_that_outlives_the_program) {
  Session session("setsid sleep 1234 & echo $!");
  const pid_t left = session.read_pid();
  EXPECT_THAT(session.line(), HasSubstr("sleep 1234"));
  EXPECT_EQ(session.wait(), 0);
  EXPECT_TRUE(ends(left));
}

TEST(TestSession, waits_for_a_process_that_ends_soon_after_the_program) {
  Session session("(sleep 0.2; echo late) & exit 3");
  EXPECT_EQ(session.line(), "late\n");
  EXPECT_EQ(session.wait(), 3);
}

TEST(TestSession, ends_a_program_that_takes_too_long) {
  Session session("trap 'echo ending' TERM; echo $$; sleep 1234 & wait; exit 0", false, "1");
  const pid_t program = session.read_pid();
  EXPECT_THAT(session.line(), HasSubstr("took longer than 1 s"));
  EXPECT_EQ(session.line(), "ending\n");
  EXPECT_EQ(session.wait(), 124);
  EXPECT_TRUE(ends(program));
}

TEST(TestSession, the_folder_for_temporary_files_is_removed) {
  Session session("touch $TMPDIR/file && mkdir $TMPDIR/sub && echo $TMPDIR");
  auto folder = session.line();
  folder.pop_back();
  EXPECT_EQ(session.wait(), 0);
  EXPECT_THAT(folder, HasSubstr("/ls-"));
  EXPECT_NE(::access(folder.c_str(), F_OK), 0);
}

TEST(TestSession, dies_with_its_parent) {
  Session session("echo $PPID; echo $$; exec sleep 1234", true);
  const pid_t wrapper = session.read_pid(), program = session.read_pid();
  ASSERT_GT(wrapper, 1);
  ASSERT_GT(program, 1);
  session.send(SIGKILL);
  EXPECT_TRUE(ends(wrapper));
  EXPECT_TRUE(ends(program));
}

TEST(TestSession, the_program_dies_with_it) {
  Session session("echo $$; exec sleep 1234");
  const pid_t program = session.read_pid();
  ASSERT_GT(program, 1);
  session.send(SIGKILL);
  EXPECT_TRUE(ends(program));
}

}  // namespace
}  // namespace lockstep::testing

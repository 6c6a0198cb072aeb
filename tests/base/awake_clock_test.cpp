#include <lockstep/base/awake_clock.h>

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

using detail::AwakeClock;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using Steady = std::chrono::steady_clock;

// Runs this program in another process, with that test and with `input` as its standard input.
pid_t start(const std::string& test, int input) {
  const std::string filter = "--gtest_filter=" + test;
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::dup2(input, STDIN_FILENO);
    ::unsetenv("GTEST_OUTPUT");
    ::execl("/proc/self/exe", "probe", filter.c_str(), "--gtest_also_run_disabled_tests", "--gtest_brief=1",
            nullptr);
    ::_exit(127);
  }
  return pid;
}

int end_of(pid_t pid) {
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Prints that it is ready, is stopped, and reads a number of nanoseconds. Then it compares the clocks.
TEST(AwakeClock, DISABLED_probe) {
  const auto begin = AwakeClock::moment();
  const auto missed = [&] {
    const auto now = AwakeClock::moment();
    return (now.steady - begin.steady) - (now.awake - begin.awake);
  };
  const char ready = 'r';
  std::int64_t stopped = 0;
  if (::write(STDIN_FILENO, &ready, 1) != 1) ::_exit(2);
  if (::read(STDIN_FILENO, &stopped, sizeof stopped) != sizeof stopped) ::_exit(3);
  // The clock is right at once, whichever thread runs first. It may count one beat of 100 ms as awake.
  if (missed() < nanoseconds(stopped) - milliseconds(100)) ::_exit(4);
  // From then on it keeps pace with the other clock. If a busy machine withholds a core from its thread for
  // half a second, that counts as stopped too, so the test retries.
  for (int i = 0; i < 100; ++i) {
    const auto before = missed();
    std::this_thread::sleep_for(milliseconds(200));
    if (missed() == before) ::_exit(0);
  }
  ::_exit(5);
}

TEST(AwakeClock, stands_still_while_the_process_is_stopped) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const pid_t pid = start("AwakeClock.DISABLED_probe", ends[1]);
  ASSERT_GT(pid, 0);
  ::close(ends[1]);
  char ready = 0;
  EXPECT_EQ(::read(ends[0], &ready, 1), 1);
  ::kill(pid, SIGSTOP);
  int status = 0;
  EXPECT_EQ(::waitpid(pid, &status, WUNTRACED), pid);
  EXPECT_TRUE(WIFSTOPPED(status));
  // Longer than the half second that any thread may wait for a core.
  const auto begin = Steady::now();
  std::this_thread::sleep_for(milliseconds(1000));
  const std::int64_t stopped = nanoseconds(Steady::now() - begin).count();
  EXPECT_EQ(::send(ends[0], &stopped, sizeof stopped, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof stopped));
  ::kill(pid, SIGCONT);
  EXPECT_EQ(end_of(pid), 0);
  ::close(ends[0]);
}

TEST(AwakeClock, goes_on_otherwise_and_waits_end_by_it) {
  // Read before and after the other clock, however long the thread is delayed.
  const auto steady = Steady::now();
  const auto awake = AwakeClock::now();
  std::mutex mutex;
  std::condition_variable never;
  std::unique_lock lock(mutex);
  EXPECT_FALSE(never.wait_until(lock, awake + milliseconds(100), [] { return false; }));
  EXPECT_GE(Steady::now() - steady, milliseconds(100));
  const auto both = AwakeClock::now() - awake;
  EXPECT_LE(both, Steady::now() - steady);
}

TEST(AwakeClock, goes_on_in_a_child_that_has_no_other_thread) {
  AwakeClock::now();
  const pid_t pid = ::fork();
  if (pid == 0) {
    const auto begin = AwakeClock::now();
    ::usleep(600 * 1000);  // Longer than half a second without a beat, which would count as stopped.
    ::_exit(AwakeClock::now() - begin >= milliseconds(600) ? 0 : 1);
  }
  EXPECT_EQ(end_of(pid), 0);
}

}  // namespace
}  // namespace lockstep::testing

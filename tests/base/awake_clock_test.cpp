#include <lockstep/base/awake_clock.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

using detail::AwakeClock;
using std::chrono::milliseconds;
using Steady = std::chrono::steady_clock;

// Another process of this program, which does what that test does.
pid_t start(const std::string& test) {
  const std::string filter = "--gtest_filter=" + test;
  const pid_t pid = ::fork();
  if (pid == 0) {
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

// Of 3 s that it takes, it is stopped for about 2.
TEST(AwakeClock, DISABLED_probe) {
  const auto awake = AwakeClock::now();
  const auto steady = Steady::now();
  std::this_thread::sleep_until(steady + milliseconds(3000));
  const auto at_once = AwakeClock::now() - awake;  // whoever of the threads is the first to run again
  std::this_thread::sleep_for(milliseconds(300));
  const auto later = AwakeClock::now() - awake;
  ::_exit(at_once < milliseconds(2000) && later < milliseconds(2300) && later >= milliseconds(300) ? 0 : 1);
}

TEST(AwakeClock, stands_still_while_the_process_is_stopped) {
  const pid_t pid = start("AwakeClock.DISABLED_probe");
  ASSERT_GT(pid, 0);
  std::this_thread::sleep_for(milliseconds(600));
  ::kill(pid, SIGSTOP);
  std::this_thread::sleep_for(milliseconds(3000));
  ::kill(pid, SIGCONT);
  EXPECT_EQ(end_of(pid), 0);
}

TEST(AwakeClock, goes_on_otherwise_and_waits_end_by_it) {
  const auto awake = AwakeClock::now();
  const auto steady = Steady::now();
  std::mutex mutex;
  std::condition_variable never;
  std::unique_lock lock(mutex);
  EXPECT_FALSE(never.wait_until(lock, awake + milliseconds(300), [] { return false; }));
  EXPECT_GE(Steady::now() - steady, milliseconds(300));
  const auto both = AwakeClock::now() - awake;
  EXPECT_LE(both, Steady::now() - steady + milliseconds(1));
}

TEST(AwakeClock, goes_on_in_a_child_that_has_no_other_thread) {
  AwakeClock::now();
  const pid_t pid = ::fork();
  if (pid == 0) {
    const auto begin = AwakeClock::now();
    ::usleep(900 * 1000);
    ::_exit(AwakeClock::now() - begin >= milliseconds(900) ? 0 : 1);
  }
  EXPECT_EQ(end_of(pid), 0);
}

}  // namespace
}  // namespace lockstep::testing

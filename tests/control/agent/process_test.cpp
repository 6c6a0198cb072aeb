// States of processes from /proc.
#include <lockstep/control/agent/process.h>

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "support/eventually.h"

namespace lockstep::control {
namespace {

// A child that only runs this, once it sleeps in the kernel.
class Sleeper {
 public:
  explicit Sleeper(void (*sleep)()) : pid_(::fork()) {
    if (pid_ == 0) {
      ::alarm(120);
      sleep();
      ::_exit(0);
    }
    testing::eventually([&] {
      const auto state = look_at(pid_);
      return state && state->state == 'S';
    });
  }
  ~Sleeper() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  pid_t pid() const { return pid_; }
  bool is_known() const {
    const auto waits_in = proc_text(pid_, "wchan");
    return !waits_in.empty() && waits_in != "0";
  }

 private:
  const pid_t pid_;
};

TEST(Process, that_sleeps_for_a_time_or_reads_is_active) {
  const Sleeper sleeps([] { ::sleep(100); }), reads([] {
    int ends[2];
    char byte = 0;
    if (::pipe(ends) == 0 && ::read(ends[0], &byte, 1) < 0) ::_exit(1);
  });
  if (!sleeps.is_known()) GTEST_SKIP() << "the kernel does not tell what processes wait for";
  // A new process also sleeps before it comes to its own call, for memory for example.
  EXPECT_TRUE(testing::eventually([&] { return has_active_thread(sleeps.pid()); }));
  EXPECT_TRUE(testing::eventually([&] { return has_active_thread(reads.pid()); }));
}

TEST(Process, that_waits_for_connections_is_idle) {
  const Sleeper polls([] { ::poll(nullptr, 0, -1); });
  EXPECT_TRUE(testing::eventually([&] { return !has_active_thread(polls.pid()); }));
}

}  // namespace
}  // namespace lockstep::control

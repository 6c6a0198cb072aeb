#include <lockstep/launch/descendants.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include <lockstep/control/agent/process.h>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

pid_t sleeping_child(bool with_child_of_its_own = false) {
  int begun[2];
  if (::pipe(begun) != 0) std::abort();
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::close(begun[0]);
    if (with_child_of_its_own && ::fork() == 0)
      while (true) ::pause();
    ::close(begun[1]);
    while (true) ::pause();
  }
  ::close(begun[1]);
  char byte;
  // The grandchild holds the pipe, and is found by its copy.
  if (!with_child_of_its_own && ::read(begun[0], &byte, 1) != 0) std::abort();
  ::close(begun[0]);
  return pid;
}

void reap() {
  while (::waitpid(-1, nullptr, WNOHANG) > 0) {
  }
}

TEST(Descendants, are_found_at_every_depth) {
  const pid_t child = sleeping_child(true);
  std::vector<pid_t> all;
  for (int i = 0; i < 1000 && all.size() < 2; ++i) {
    all = detail::descendants();
    ::usleep(10000);
  }
  EXPECT_EQ(all.size(), 2);
  EXPECT_EQ(std::count(all.begin(), all.end(), child), 1);
  EXPECT_TRUE(detail::descendants({child}).empty());
  EXPECT_EQ(detail::children(::getpid()), std::vector<pid_t>{child});
  EXPECT_EQ(control::look_at(child)->parent, ::getpid());
  EXPECT_TRUE(detail::end_descendants(std::chrono::seconds(30), reap).empty());
  EXPECT_TRUE(detail::descendants().empty());
  EXPECT_FALSE(control::look_at(child).has_value());
}

TEST(Descendants, that_are_spared_live_on) {
  const pid_t spared = sleeping_child(), other = sleeping_child();
  EXPECT_TRUE(detail::end_descendants(std::chrono::seconds(30), reap, {spared}).empty());
  EXPECT_EQ(::kill(other, 0), -1);
  EXPECT_EQ(::kill(spared, 0), 0);
  ::kill(spared, SIGKILL);
  ::waitpid(spared, nullptr, 0);
}

TEST(Descendants, have_a_state) {
  const pid_t child = sleeping_child();
  ::kill(child, SIGSTOP);
  ::waitpid(child, nullptr, WUNTRACED);
  EXPECT_EQ(control::look_at(child)->state, 'T');
  ::kill(child, SIGKILL);
  siginfo_t info{};
  ::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT);
  EXPECT_EQ(control::look_at(child)->state, 'Z');
  EXPECT_TRUE(detail::descendants().empty());
  ::waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace lockstep::testing

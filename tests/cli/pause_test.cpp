// A job that is stopped and continued (Ctrl-Z, fg): what its ranks make of it.
#include <signal.h>
#include <unistd.h>

#include "cli/session.h"
#include "support/errors.h"

namespace lockstep::testing {
namespace {

TEST(Pause, longer_than_the_timeout_harms_no_operation) {
  for (const std::string backend : {"shm", "gloo"}) {
    Session session({LOCKSTEP_PROGRAM, "run", "-q", "-n", "2", "--timeout", "2", "--env",
                     "LOCKSTEP_BACKEND=" + backend, LOCKSTEP_PATIENT});
    ASSERT_TRUE(session.wait_for(" pid ") && session.wait_for(" pid ")) << session.output();
    session.send(SIGTSTP);
    ::usleep(4000 * 1000);
    session.send(SIGCONT);
    ASSERT_EQ(session.wait(std::chrono::seconds(2)), -1) << session.output();
    session.send(SIGTERM);
    EXPECT_EQ(session.wait(), 128 + SIGTERM) << session.output();
    EXPECT_THAT(session.output(), AllOf(Not(HasSubstr("failed")), Not(HasSubstr("has waited")))) << backend;
  }
}

TEST(Pause, the_timeout_holds_after_it) {
  for (const std::string backend : {"shm", "gloo"}) {
    Session session({LOCKSTEP_PROGRAM, "run", "-q", "-n", "2", "--timeout", "3", "--env",
                     "LOCKSTEP_BACKEND=" + backend, LOCKSTEP_PATIENT, "stay away"});
    ASSERT_TRUE(session.wait_for(" pid ") && session.wait_for(" pid ")) << session.output();
    session.send(SIGTSTP);
    ::usleep(4000 * 1000);
    session.send(SIGCONT);
    EXPECT_TRUE(session.wait_for("not complete within 3.000 s, its deadline")) << session.output();
    EXPECT_EQ(session.wait(), 4) << session.output();
  }
}

}  // namespace
}  // namespace lockstep::testing

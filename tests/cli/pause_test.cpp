// How the ranks of a job react when it is stopped and continued (Ctrl-Z, fg).
#include <signal.h>
#include <unistd.h>

#include <functional>

#include "cli/session.h"
#include "support/errors.h"

namespace lockstep::testing {
namespace {

// Two jobs with operations that time out after 3 s, one on each backend. Both are stopped for longer, at the
// same time, and continue; then `check` looks at each.
void stop_for_4_s(const std::vector<std::string>& arguments, const std::function<void(Session&)>& check) {
  const auto command = [&](const std::string& backend) {
    std::vector<std::string> words = {
        LOCKSTEP_PROGRAM, "run", "-q", "-n", "2", "--timeout", "3", "--env", "LOCKSTEP_BACKEND=" + backend,
        LOCKSTEP_PATIENT};
    words.insert(words.end(), arguments.begin(), arguments.end());
    return words;
  };
  Session shm(command("shm")), gloo(command("gloo"));
  for (auto* session : {&shm, &gloo})
    ASSERT_TRUE(session->wait_for(" pid ") && session->wait_for(" pid ")) << session->output();
  for (auto* session : {&shm, &gloo}) session->send(SIGTSTP);
  ::usleep(4000 * 1000);
  for (auto* session : {&shm, &gloo}) session->send(SIGCONT);
  check(shm);
  check(gloo);
}

TEST(Pause, longer_than_the_timeout_harms_no_operation) {
  stop_for_4_s({}, [](Session& session) {
    ASSERT_EQ(session.wait(std::chrono::seconds(2)), -1) << session.output();
    session.send(SIGTERM);
    EXPECT_EQ(session.wait(), 128 + SIGTERM) << session.output();
    EXPECT_THAT(session.output(), AllOf(Not(HasSubstr("failed")), Not(HasSubstr("has waited"))));
  });
}

TEST(Pause, the_timeout_holds_after_it) {
  stop_for_4_s({"stay away"}, [](Session& session) {
    EXPECT_TRUE(session.wait_for("not complete within 3.000 s (its deadline)")) << session.output();
    EXPECT_EQ(session.wait(), 4) << session.output();
  });
}

}  // namespace
}  // namespace lockstep::testing

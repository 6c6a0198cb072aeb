// What the pages say of programs is what these do.
#include <fstream>
#include <sstream>

#include "support/errors.h"
#include "support/process.h"

namespace lockstep::testing {
namespace {

std::string page(const std::string& file) {
  std::ifstream in(std::string(LOCKSTEP_SOURCE) + "/" + file);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

TEST(Docs, hello_prints_what_its_page_shows) {
  const auto outcome = run(
      {{LOCKSTEP_PROGRAM, "run", "--quiet", "-n", "4", LOCKSTEP_HELLO}, {{"LOCKSTEP_BACKEND", "cpu:auto"}}});
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_THAT(page("examples/00_hello/README.md"),
              HasSubstr("$ build/bin/lockstep run --quiet -n 4 build/bin/00_hello\n" + outcome.output));
}

TEST(Docs, the_readme_has_both_commands_and_ci_calls_one_of_them) {
  EXPECT_THAT(page("README.md"), AllOf(HasSubstr("./dev demo"), HasSubstr("./dev test")));
  EXPECT_THAT(page(".ci/run"), HasSubstr("./dev test"));
}

TEST(Docs, every_variable_that_is_read_is_in_the_docs) {
  const auto docs = page("docs/concepts.md");
  for (const char* name : {"LOCKSTEP_BACKEND", "LOCKSTEP_TIMEOUT", "LOCKSTEP_JOIN_TIMEOUT", "LOCKSTEP_CHECK",
                           "LOCKSTEP_LOG", "LOCKSTEP_MPI", "LOCKSTEP_KEY_FILE", "LOCKSTEP_STOP_GRACE",
                           "LOCKSTEP_AGENT", "GLOO_SOCKET_IFNAME", "MASTER_ADDR", "LOCAL_RANK"})
    EXPECT_THAT(docs, HasSubstr(name));
}

}  // namespace
}  // namespace lockstep::testing

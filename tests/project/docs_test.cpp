// Checks that programs behave as the documentation says.
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

}  // namespace
}  // namespace lockstep::testing

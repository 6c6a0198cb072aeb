// `lockstep key`.
#include <sys/stat.h>

#include "support/errors.h"
#include "support/folder.h"
#include "support/process.h"

namespace lockstep::testing {
namespace {

Outcome key(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {LOCKSTEP_PROGRAM, "key"});
  return run({arguments});
}

TEST(KeyVerb, prints_a_key_or_makes_a_file_for_this_user_alone) {
  const auto printed = key({});
  EXPECT_EQ(printed.status, 0);
  EXPECT_THAT(printed.output, ::testing::MatchesRegex("[0-9a-f]+\n"));
  EXPECT_EQ(printed.output.size(), 65);

  const Folder folder;
  const auto path = folder / "job.key";
  const auto made = key({"--output", path});
  EXPECT_EQ(made.status, 0);
  EXPECT_EQ(made.output, "");
  struct stat status {};
  EXPECT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0600);
  EXPECT_EQ(status.st_size, 65);

  const auto again = key({"--output", path});
  EXPECT_EQ(again.status, 2);
  EXPECT_THAT(again.output, AllOf(HasSubstr(path.string()), HasSubstr("never overwritten")));
}

TEST(KeyVerb, a_key_is_never_an_argument) {
  const auto outcome = key({std::string(64, 'a')});
  EXPECT_EQ(outcome.status, 2);
}

}  // namespace
}  // namespace lockstep::testing

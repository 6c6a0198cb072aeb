// Lines that a program prints without flushing appear at once under `lockstep run`, and survive its death.
#include <fstream>
#include <sstream>

#include "cli/session.h"
#include "support/errors.h"
#include "support/folder.h"
#include "support/process.h"

namespace lockstep::testing {
namespace {

const std::vector<std::string> kRunLinesProbe = {
    LOCKSTEP_PROGRAM, "run", "-q", "-n", "1", "--prefix", "always", LOCKSTEP_LINES_PROBE};

TEST(Lines, appear_at_once_and_survive_the_death_of_the_rank) {
  auto command = kRunLinesProbe;
  command.push_back("wait");
  Session session(command);
  for (const char* line : {"[0] before main\n", "[0] by stdio, before the World\n",
                           "[0] by stdio, a terminal: 0\n", "[0] by cout\n"})
    EXPECT_TRUE(session.wait_for(line)) << line << session.output();
  session.type("\n");
  EXPECT_EQ(session.wait(), 128 + SIGKILL);
  EXPECT_THAT(session.output(), HasSubstr("[0] the last line\n"));
}

TEST(Lines, are_buffered_as_the_program_asks) {
  auto command = kRunLinesProbe;
  command.push_back("blocks");
  EXPECT_THAT(run({command}).output, Not(HasSubstr("by cout")));
}

TEST(Lines, are_left_alone_where_the_launcher_does_not_read_them) {
  EXPECT_THAT(run({{LOCKSTEP_LINES_PROBE}}).output, Not(HasSubstr("by stdio")));
  const Folder folder;
  const auto file = folder / "output";
  run({{LOCKSTEP_PROGRAM, "run", "-q", "-n", "1", "bash", "-c",
        LOCKSTEP_LINES_PROBE + std::string(" > ") + file.string()}});
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  EXPECT_EQ(text.str(), "");
}

}  // namespace
}  // namespace lockstep::testing

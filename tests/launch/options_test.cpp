#include <lockstep/launch/options.h>

#include <lockstep/base/error.h>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

using detail::RankSet;

std::string members(const char* text) {
  const auto set = RankSet::parse("--show", text);
  std::string list;
  for (int rank = 0; rank < 10; ++rank)
    if (set.contains(rank)) list += static_cast<char>('0' + rank);
  return list;
}

TEST(RankSet, reads_lists_and_ranges) {
  EXPECT_EQ(members("all"), "0123456789");
  EXPECT_EQ(members("none"), "");
  EXPECT_EQ(members("3"), "3");
  EXPECT_EQ(members("0,2"), "02");
  EXPECT_EQ(members("1-3,7,8-9"), "123789");
  EXPECT_EQ(RankSet::parse("--show", "1-3,2").highest(), 3);
  EXPECT_EQ(RankSet::all().highest(), -1);
}

TEST(RankSet, explains_what_it_cannot_read) {
  for (const char* text : {"", ",", "1,", ",1", "a", "1-", "-1", "3-1", "1 2", "99999999999", "0x1"})
    EXPECT_THAT(error_of<ConfigError>([&] { RankSet::parse("--show", text); }),
                AllOf(HasSubstr("--show: expected"), HasSubstr("got '" + std::string(text) + "'")));
}

}  // namespace
}  // namespace lockstep::testing

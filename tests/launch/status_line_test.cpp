#include <lockstep/launch/status_line.h>

#include <cmath>

#include "support/errors.h"

namespace lockstep::detail {
namespace {

TEST(StatusLine, has_what_is_known) {
  control::Status status;
  status.step = 12;
  EXPECT_EQ(status_text(status), "step 12");
  status.steps_per_second = 9.8;
  status.waiting = 0.123;
  status.slowest = 2;
  status.slowness = 1.25;
  status.metrics = {{"loss", 0.123456789, 12}, {"samples", 64, 12}, {"rate", std::nan(""), 12}};
  EXPECT_EQ(status_text(status),
            "step 12 | 9.80 steps/s | loss 0.1235 | 627 samples/s | rate nan | waiting 12% | slowest rank 2 "
            "(1.2x)");
  status.metrics = {{"a\033[2Jb", 1, -1}};  // A page that was overwritten.
  EXPECT_THAT(status_text(status), ::testing::HasSubstr("| a?[2Jb 1 |"));
  status.metrics = {
      {"a\xc2\x9b"
       "2Jb\xc2",
       1, -1}};  // The same as one character.
  EXPECT_THAT(status_text(status), ::testing::HasSubstr("| a??2Jb\xc2 1 |"));
}

TEST(StatusLine, is_cut_between_characters) {
  EXPECT_EQ(cut_to_columns("abc", 5), "abc");
  EXPECT_EQ(cut_to_columns("abcdef", 5), "abcde");
  EXPECT_EQ(cut_to_columns("abcdef", 0), "");
  EXPECT_EQ(cut_to_columns("a\xe6\x90\x8d\xe6\x90\x8d", 4), "a\xe6\x90\x8d");
  EXPECT_EQ(cut_to_columns("\xff\xff\xff", 3), "\xff");
}

}  // namespace
}  // namespace lockstep::detail

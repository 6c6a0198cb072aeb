#include <lockstep/base/environment.h>

#include <lockstep/base/error.h>

#include "support/environment.h"
#include "support/errors.h"

namespace lockstep::testing {
namespace {

using std::chrono::milliseconds;

TEST(Environment, an_empty_variable_counts_as_unset) {
  ScopedEnvironment scope("LOCKSTEP_TEST", "");
  EXPECT_EQ(env::text("LOCKSTEP_TEST"), std::nullopt);
  EXPECT_EQ(env::integer("LOCKSTEP_TEST", 0, 9), std::nullopt);
  EXPECT_EQ(env::duration("LOCKSTEP_TEST"), std::nullopt);
  EXPECT_TRUE(env::flag("LOCKSTEP_TEST", true));
}

TEST(Environment, integers_are_read_whole_and_within_bounds) {
  for (const char* good : {"0", "7", "-3", "9"}) {
    ScopedEnvironment scope("LOCKSTEP_TEST", good);
    EXPECT_EQ(env::integer("LOCKSTEP_TEST", -3, 9), std::atoi(good));
  }
  for (const char* bad :
       {"x", "7x", " 7", "7 ", "10", "-4", "1e3", "0x5", "99999999999999999999", "+1", "1.0"}) {
    ScopedEnvironment scope("LOCKSTEP_TEST", bad);
    EXPECT_THAT(error_of<ConfigError>([] { (void)env::integer("LOCKSTEP_TEST", -3, 9); }),
                AllOf(HasSubstr("LOCKSTEP_TEST"), HasSubstr(bad), HasSubstr("-3"), HasSubstr("9")));
  }
}

TEST(Environment, flags_are_words_for_yes_and_no) {
  for (const char* yes : {"1", "true", "YES", "On"}) {
    ScopedEnvironment scope("LOCKSTEP_TEST", yes);
    EXPECT_TRUE(env::flag("LOCKSTEP_TEST", false));
  }
  for (const char* no : {"0", "False", "no", "OFF"}) {
    ScopedEnvironment scope("LOCKSTEP_TEST", no);
    EXPECT_FALSE(env::flag("LOCKSTEP_TEST", true));
  }
  ScopedEnvironment scope("LOCKSTEP_TEST", "maybe");
  EXPECT_THAT(error_of<ConfigError>([] { env::flag("LOCKSTEP_TEST", true); }), HasSubstr("maybe"));
}

TEST(Environment, durations_have_units) {
  EXPECT_EQ(env::parse_duration("t", "250ms"), milliseconds(250));
  EXPECT_EQ(env::parse_duration("t", "30s"), milliseconds(30'000));
  EXPECT_EQ(env::parse_duration("t", "1.5"), milliseconds(1500));
  EXPECT_EQ(env::parse_duration("t", "5m"), milliseconds(300'000));
  EXPECT_EQ(env::parse_duration("t", "2h"), milliseconds(7'200'000));
  for (const char* bad : {"", "s", "-1s", "0", "0.1ms", "nan", "inf", "1d", "5 m", "1e9h"})
    EXPECT_THAT(error_of<ConfigError>([&] { env::parse_duration("the limit", bad); }),
                HasSubstr("the limit"));
}

}  // namespace
}  // namespace lockstep::testing

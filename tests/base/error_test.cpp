#include <lockstep/base/error.h>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

TEST(Error, a_comm_error_tells_who_what_where_and_how_long) {
  CommError::Details details;
  details.cause = "rank 2 died: SIGKILL";
  details.operation = "all_reduce";
  details.group = "world";
  details.rank = 1;
  details.size = 4;
  details.peer = 2;
  details.sequence = 1841;
  details.tensor = "float32 [10, 4]";
  details.tag = "grads";
  details.call_site = "train.cpp:42";
  details.elapsed = std::chrono::milliseconds(1500);
  const CommError error(details);
  for (const char* part :
       {"all_reduce #1841", "group 'world'", "rank 1 of 4", "1.500 s", "rank 2 died: SIGKILL", "peer: rank 2",
        "float32 [10, 4]", "grads", "train.cpp:42"})
    EXPECT_THAT(error.what(), HasSubstr(part));
  EXPECT_EQ(error.details().sequence, 1841u);
  EXPECT_EQ(error.kind(), CommError::Kind::engine) << "where nothing more is known";
  details.kind = CommError::Kind::peer_died;
  EXPECT_EQ(CommError(details).kind(), CommError::Kind::peer_died);
  EXPECT_EQ(name(CommError::Kind::peer_died), "peer_died");
}

TEST(Error, what_is_unknown_is_left_out) {
  EXPECT_THAT(CommError(CommError::Details{}).what(), AllOf(Not(HasSubstr("peer")), Not(HasSubstr("tag"))));
}

TEST(Error, an_assertion_throws_and_names_itself) {
  const int two = 2;
  EXPECT_THAT(error_of<Error>([&] { LOCKSTEP_ASSERT(two == 3, "numbers are off"); }),
              AllOf(HasSubstr("two == 3"), HasSubstr("numbers are off"), HasSubstr("error_test.cpp")));
}

}  // namespace
}  // namespace lockstep::testing

#include <lockstep/control/coordinator/store.h>

#include <thread>

#include "support/errors.h"

namespace lockstep::control {
namespace {

using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;

class Store : public ::testing::Test {
 protected:
  StoreReply ask(StoreRequest request, int who = 0) {
    std::optional<StoreReply> answer;
    server.handle(who, StoreRequest::decode(request.encode()),
                  [&](StoreReply reply) { answer = std::move(reply); });
    EXPECT_TRUE(answer) << "no answer yet";
    return answer.value_or(StoreReply{});
  }
  StoreServer server;
};

TEST_F(Store, values_are_kept_and_counted) {
  ask({.call = StoreCall::set, .keys = {"a"}, .values = {"1"}});
  ask({.call = StoreCall::multi_set, .keys = {"b", "c"}, .values = {"2", "3"}});
  EXPECT_THAT(ask({.call = StoreCall::get, .keys = {"c", "a"}, .values = {}}).values, ElementsAre("3", "1"));
  EXPECT_EQ(ask({.call = StoreCall::count, .keys = {}, .values = {}}).number, 3);
  EXPECT_EQ(ask({.call = StoreCall::check, .keys = {"a", "b"}, .values = {}}).number, 1);
  EXPECT_EQ(ask({.call = StoreCall::check, .keys = {"a", "x"}, .values = {}}).number, 0);
  EXPECT_EQ(ask({.call = StoreCall::erase, .keys = {"a"}, .values = {}}).number, 1);
  EXPECT_EQ(ask({.call = StoreCall::erase, .keys = {"a"}, .values = {}}).number, 0);
  ask({.call = StoreCall::append, .keys = {"b"}, .values = {"!"}});
  EXPECT_THAT(ask({.call = StoreCall::get, .keys = {"b"}, .values = {}}).values, ElementsAre("2!"));
}

TEST_F(Store, counters_add_up_and_do_not_overflow) {
  EXPECT_EQ(ask({.call = StoreCall::add, .keys = {"n"}, .values = {}, .number = 5}).number, 5);
  EXPECT_EQ(ask({.call = StoreCall::add, .keys = {"n"}, .values = {}, .number = -7}).number, -2);
  EXPECT_THAT(ask({.call = StoreCall::get, .keys = {"n"}, .values = {}}).values, ElementsAre("-2"));
  EXPECT_THAT(ask({.call = StoreCall::add, .keys = {"n"}, .values = {}, .number = INT64_MIN}).error,
              HasSubstr("overflow"));
  EXPECT_THAT(ask({.call = StoreCall::get, .keys = {"n"}, .values = {}}).values, ElementsAre("-2"));
}

// The four cases of c10d's stores.
TEST_F(Store, compare_set_sets_where_what_is_there_was_expected) {
  auto compare = [&](const char* expected, const char* desired) {
    return ask({.call = StoreCall::compare_set, .keys = {"k"}, .values = {expected, desired}}).values.at(0);
  };
  EXPECT_EQ(compare("old", "new"), "old");
  EXPECT_EQ(ask({.call = StoreCall::count, .keys = {}, .values = {}}).number, 0);
  EXPECT_EQ(compare("", "first"), "first");
  EXPECT_EQ(compare("other", "second"), "first");
  EXPECT_EQ(compare("first", "second"), "second");
}

TEST_F(Store, a_get_is_answered_when_its_last_key_is_there) {
  std::vector<std::string> answer;
  server.handle(7, {.call = StoreCall::get, .keys = {"a", "b"}, .values = {}},
                [&](StoreReply reply) { answer = reply.values; });
  ask({.call = StoreCall::set, .keys = {"b"}, .values = {"2"}});
  EXPECT_TRUE(answer.empty());
  ask({.call = StoreCall::set, .keys = {"a"}, .values = {"1"}});
  EXPECT_THAT(answer, ElementsAre("1", "2"));
}

TEST_F(Store, whoever_has_gone_gets_no_answer) {
  bool answered = false;
  server.handle(7, {.call = StoreCall::get, .keys = {"a"}, .values = {}},
                [&](StoreReply) { answered = true; });
  server.forget(7);
  ask({.call = StoreCall::set, .keys = {"a"}, .values = {"1"}});
  EXPECT_FALSE(answered);
}

TEST_F(Store, a_full_store_says_so_and_keeps_what_it_has) {
  const std::string large((1 << 20) - 8192, 'x');
  StoreReply reply;
  int kept = 0;
  while (reply.error.empty() && kept < 300) {
    std::optional<StoreReply> answer;
    server.handle(0, {.call = StoreCall::set, .keys = {std::to_string(kept)}, .values = {large}},
                  [&](StoreReply each) { answer = std::move(each); });
    reply = *answer;
    kept += reply.error.empty();
  }
  EXPECT_THAT(reply.error, HasSubstr("full"));
  EXPECT_GT(kept, 200);
  EXPECT_EQ(server.size(), static_cast<std::size_t>(kept));
}

TEST_F(Store, what_is_no_number_is_not_counted_from) {
  for (const char* value : {"abc", "12x", ""}) {
    ask({.call = StoreCall::set, .keys = {"n"}, .values = {value}});
    EXPECT_THAT(ask({.call = StoreCall::add, .keys = {"n"}, .values = {}, .number = 1}).error,
                HasSubstr("not a number"));
    EXPECT_THAT(ask({.call = StoreCall::get, .keys = {"n"}, .values = {}}).values, ElementsAre(value));
  }
}

TEST_F(Store, several_values_are_set_all_or_none) {
  ask({.call = StoreCall::set, .keys = {"a"}, .values = {"old"}});
  std::optional<StoreReply> answer;
  server.handle(0,
                {.call = StoreCall::multi_set,
                 .keys = {"a", "new", "large"},
                 .values = {"other", "1", std::string(2 << 20, 'x')}},
                [&](StoreReply reply) { answer = std::move(reply); });
  EXPECT_THAT(answer->error, HasSubstr("at most"));
  EXPECT_THAT(ask({.call = StoreCall::get, .keys = {"a"}, .values = {}}).values, ElementsAre("old"));
  EXPECT_EQ(server.size(), 1u);
}

TEST_F(Store, a_wait_has_no_values_however_large_they_are) {
  for (const char* key : {"a", "b", "c"})
    ask({.call = StoreCall::set, .keys = {key}, .values = {std::string(1 << 19, 'x')}});
  const auto reply = ask({.call = StoreCall::wait, .keys = {"a", "b", "c"}, .values = {}});
  EXPECT_EQ(reply.error, "");
  EXPECT_TRUE(reply.values.empty());
}

TEST_F(Store, a_request_that_is_given_up_is_forgotten) {
  int answered = 0;
  for (int id : {1, 2})
    server.handle(
        7, {.call = id == 1 ? StoreCall::get : StoreCall::wait, .keys = {"a"}, .values = {}},
        [&](StoreReply) { ++answered; }, id);
  auto forget = [&](int who) {
    server.handle(who, StoreRequest::decode(StoreRequest{.call = StoreCall::forget, .number = 1}.encode()),
                  [](StoreReply) { ADD_FAILURE() << "no request waits for that"; });
  };
  forget(8);  // Another client's.
  EXPECT_EQ(server.num_waiting(), 2u);
  forget(7);
  EXPECT_EQ(server.num_waiting(), 1u);
  ask({.call = StoreCall::set, .keys = {"a"}, .values = {"1"}});
  EXPECT_EQ(answered, 1);
}

TEST_F(Store, an_answer_is_no_longer_than_a_message) {
  ask({.call = StoreCall::set, .keys = {"k"}, .values = {std::string(1 << 19, 'x')}});
  EXPECT_THAT(ask({.call = StoreCall::get, .keys = std::vector<std::string>(1000, "k")}).error,
              HasSubstr("exceed the limit"));
  for (int i = 0; i < 2; ++i)
    ask({.call = StoreCall::append, .keys = {"k"}, .values = {std::string(1 << 19, 'x')}});
  const auto value = ask({.call = StoreCall::get, .keys = {"k"}});
  EXPECT_EQ(value.error, "");
  EXPECT_LE(value.encode().size(), kMostPayload);
  EXPECT_THAT(ask({.call = StoreCall::append, .keys = {"k"}, .values = {std::string(1 << 19, 'x')}}).error,
              HasSubstr("at most"));
}

TEST_F(Store, requests_that_no_rank_makes_are_refused) {
  for (const StoreRequest& request :
       {StoreRequest{.call = StoreCall::set, .keys = {}, .values = {"v"}},
        StoreRequest{.call = StoreCall::set, .keys = {"k"}, .values = {}},
        StoreRequest{.call = StoreCall::compare_set, .keys = {"k"}, .values = {"v"}},
        StoreRequest{.call = StoreCall::count, .keys = {"k"}, .values = {}},
        StoreRequest{.call = StoreCall::add, .keys = {std::string(5000, 'k')}}})
    EXPECT_THROW(StoreRequest::decode(request.encode()), FrameError);
  EXPECT_THROW(StoreRequest::decode(""), FrameError);
  EXPECT_THROW(StoreRequest::decode(StoreRequest{.call = StoreCall::count}.encode() + "x"), FrameError);
}

TEST(LocalStore, a_wait_ends_at_the_value_the_deadline_or_a_failure) {
  LocalStore store;
  std::atomic<bool> failed = false;
  auto fails = [&] { return failed.load(); };
  const StoreRequest get{.call = StoreCall::get, .keys = {"k"}, .values = {}};
  EXPECT_THAT(error_of<Error>([&] { store.ask(get, Clock::now() + std::chrono::milliseconds(20), fails); }),
              HasSubstr("timeout for: k"));
  std::thread setter([&] {
    store.ask({.call = StoreCall::set, .keys = {"k"}, .values = {"v"}},
              Clock::now() + std::chrono::seconds(10), fails);
  });
  EXPECT_THAT(store.ask(get, Clock::now() + std::chrono::seconds(10), fails).values, ElementsAre("v"));
  setter.join();
  std::thread breaker([&] {
    failed = true;
    store.wake();
  });
  const StoreRequest other{.call = StoreCall::get, .keys = {"other"}, .values = {}};
  EXPECT_THAT(error_of<Error>([&] { store.ask(other, Clock::now() + std::chrono::seconds(60), fails); }),
              HasSubstr("failed"));
  breaker.join();
}

}  // namespace
}  // namespace lockstep::control

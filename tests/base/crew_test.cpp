#include <lockstep/base/crew.h>

#include <csignal>

#include <atomic>
#include <thread>

#include <gtest/gtest.h>

namespace lockstep::detail {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(Crew, has_let_go_of_everything_when_it_was_waited_for) {
  for (int round = 0; round < 50; ++round) {
    Crew crew;
    auto held = std::make_shared<int>();
    std::atomic<bool> go = false;
    for (int i = 0; i < 3; ++i)
      ASSERT_TRUE(crew.start([held, &go] {
        while (!go) std::this_thread::yield();
      }));
    EXPECT_FALSE(crew.wait(milliseconds(1)));
    go = true;
    EXPECT_TRUE(crew.wait(seconds(20)));
    EXPECT_EQ(held.use_count(), 1);
  }
}

// A thread's state in libraries, such as CUDA's, is destroyed when the thread ends, after its body.
TEST(Crew, threads_have_nothing_of_their_own_left_when_they_were_waited_for) {
  static std::atomic<int> alive;
  struct Slow {
    Slow() { ++alive; }
    ~Slow() {
      std::this_thread::sleep_for(milliseconds(30));
      --alive;
    }
  };
  alive = 0;
  Crew crew;
  for (int i = 0; i < 3; ++i)
    ASSERT_TRUE(crew.start([] {
      thread_local Slow own;
      static_cast<void>(&own);
    }));
  std::thread another([&] {
    EXPECT_TRUE(crew.wait(seconds(20)));
    EXPECT_EQ(alive, 0);
  });
  EXPECT_TRUE(crew.wait(seconds(20)));
  EXPECT_EQ(alive, 0);
  another.join();
}

TEST(Crew, many_short_lives_one_after_another) {
  Crew crew;
  std::atomic<int> ended = 0;
  for (int i = 0; i < 500; ++i) ASSERT_TRUE(crew.start([&] { ++ended; }));
  EXPECT_TRUE(crew.wait(seconds(20)));
  EXPECT_EQ(ended, 500);
}

TEST(Crew, nobody_waits_for_itself) {
  Crew crew;
  std::atomic<bool> alone = false;
  ASSERT_TRUE(crew.start([&] { alone = crew.wait(seconds(20)); }));
  EXPECT_TRUE(crew.wait(seconds(20)));
  EXPECT_TRUE(alone);
  EXPECT_TRUE(crew.wait(milliseconds(0)));
}

TEST(Crew, takes_no_signals_and_may_outlive_its_owner) {
  std::atomic<int> blocked = -1;
  {
    Crew crew;
    ASSERT_TRUE(crew.start([&] {
      std::this_thread::sleep_for(milliseconds(10));
      sigset_t mask;
      ::pthread_sigmask(SIG_SETMASK, nullptr, &mask);
      blocked = ::sigismember(&mask, SIGTERM);
    }));
  }
  for (int i = 0; i < 2000 && blocked < 0; ++i) std::this_thread::sleep_for(milliseconds(10));
  EXPECT_EQ(blocked, 1);
}

}  // namespace
}  // namespace lockstep::detail

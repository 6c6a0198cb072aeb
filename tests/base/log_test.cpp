#include <lockstep/base/log.h>

#include <atomic>
#include <thread>
#include <vector>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

using detail::log;

// Restores standard error and the default level.
struct Sinking {
  explicit Sinking(LogSink sink) { set_log_sink(std::move(sink)); }
  ~Sinking() {
    set_log_sink(nullptr);
    set_log_level(LogLevel::warn);
  }
};

TEST(Log, a_sink_gets_what_the_level_lets_through) {
  std::vector<std::string> lines;
  Sinking scope([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  log(LogLevel::info, "hidden {}", 1);
  log(LogLevel::warn, "shown {}", 2);
  set_log_level(LogLevel::debug);
  log(LogLevel::debug, "shown {}", 3);
  set_log_level(LogLevel::off);
  log(LogLevel::error, "hidden {}", 4);
  EXPECT_EQ(lines, (std::vector<std::string>{"shown 2", "shown 3"}));
}

TEST(Log, a_sink_that_throws_does_not_reach_the_caller) {
  Sinking scope([](LogLevel, std::string_view) { throw std::runtime_error("full"); });
  log(LogLevel::error, "a line");
}

TEST(Log, threads_may_log_while_the_sink_changes) {
  std::atomic<int> count = 0;
  auto sink = [&](LogLevel, std::string_view) { ++count; };
  Sinking scope(sink);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 500; ++i) {
        log(LogLevel::error, "thread {} line {}", t, i);
        if (i % 50 == 0) set_log_sink(sink);
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(count, 2000);
}

TEST(Log, lines_to_standard_error_carry_the_rank) {
  ::testing::internal::CaptureStderr();
  std::thread([] {
    detail::set_log_prefix("rank 3");
    log(LogLevel::error, "something");
  }).join();
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "[lockstep rank 3] error: something\n");
}

}  // namespace
}  // namespace lockstep::testing

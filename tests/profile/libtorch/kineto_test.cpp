// Operators recorded by Kineto, compared with those from callbacks.
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/torch.h>

#include <time.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <lockstep/profile/libtorch/kineto.h>
#include <lockstep/profile/record/recorder.h>
#include <lockstep/profile/report/summary.h>

#include "support/folder.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;

std::filesystem::path trace_folder(const char* name) {
  static const testing::Folder all;
  const auto path = all / name;
  std::filesystem::remove_all(path);
  return path;
}

std::map<std::string, int> operators_of(const profile::RankProfile& profile) {
  std::map<std::string, int> count;
  for (const auto& event : profile.events)
    if (event.kind == profile::SpanKind::operation)
      ++count[profile.threads[static_cast<std::size_t>(event.thread)] + " " +
              profile.names[static_cast<std::size_t>(event.name)]];
  return count;
}

void use_processor(double ms) {
  const auto used = [] {
    timespec time{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) / 1e6;
  };
  volatile double sum = 0;
  for (const double end = used() + ms; used() < end;) sum = sum + 1;
}

// How long the calling thread has been runnable without a CPU. 0 if the kernel does not report it.
double lateness_ms() {
  std::ifstream file("/proc/thread-self/schedstat");
  double ran_ns = 0, waited_ns = 0;
  file >> ran_ns >> waited_ns;
  return waited_ns / 1e6;
}

// Runs operators forward and backward, an optimizer, 30 ms of the program's own code and 30 ms of sleep. Adds
// the lateness of a step to `lateness`.
profile::RankProfile profile_of(OperatorSource source, const char* name, double* lateness = nullptr) {
  const auto directory = trace_folder(name);
  World world = World::from_environment();
  at::set_num_threads(1);
  auto weight = torch::ones({192, 192}).requires_grad_();
  SGD optimizer({weight}, {.lr = 1e-9});
  Profiler profiler(world, {.first = 2, .last = 3, .directory = directory.string(), .operators = source});
  double begin = 0;
  for (int step = 0; step < 3; ++step) {
    if (step == 1) begin = lateness_ms();
    optimizer.zero_grad();
    auto input = torch::ones({192, 192});
    for (int i = 0; i < 20; ++i) input = at::mm(input, weight).mul(1.0 / 192);
    input.sum().backward();
    optimizer.step();
    use_processor(30);
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    profiler.step();
  }
  if (lateness != nullptr) *lateness += (lateness_ms() - begin) / 2;
  profiler.finish();
  return profile::read(directory / "rank-0.json");
}

TEST(KinetoOperators, are_those_that_callbacks_tell_of) {
  const auto callbacks = operators_of(profile_of(OperatorSource::callbacks, "callbacks"));
  const auto profile = profile_of(OperatorSource::kineto, "kineto");
  const auto kineto = operators_of(profile);
  EXPECT_GT(profile.memory.size(), profile.steps.size());         // sampled between operators
  EXPECT_EQ(callbacks.at("main aten::mm"), 2 * 20 * 2 + 2 * 19);  // the first input needs no gradient
  EXPECT_EQ(kineto, callbacks);
}

// On a busy machine a thread may be preempted, which distorts any part. Not every machine reports for how
// long, so there are several attempts.
TEST(KinetoOperators, make_the_same_parts_of_a_step) {
  std::string told;
  for (int attempt = 0; attempt < 10; ++attempt) {
    double late = 0;
    const auto one = profile::summarize({profile_of(OperatorSource::callbacks, "callbacks", &late)}).overall;
    const auto two = profile::summarize({profile_of(OperatorSource::kineto, "kineto", &late)}).overall;
    const auto near = [&](double a, double b, double share) {
      return std::abs(a - b) <= share * std::max(a, b) + late;
    };
    told =
        fmt::format("compute {} {}, code {} {}, idle {} {}, optimizer {} {}, other {} {}", one.parts.compute,
                    two.parts.compute, one.parts.code, two.parts.code, one.parts.idle, two.parts.idle,
                    one.parts.optimizer, two.parts.optimizer, one.parts.other, two.parts.other);
    if (near(one.parts.compute, two.parts.compute, 0.25) && near(one.parts.code, two.parts.code, 0.1) &&
        near(two.parts.code, 30, 0.1) && near(one.parts.idle, two.parts.idle, 0.1) &&
        two.parts.other <= 0.02 * two.step_mean + late) {
      std::printf("%s\n", told.c_str());
      return;
    }
  }
  FAIL() << told;
}

// Both clocks are calibrated by readings between which the thread may be preempted on a busy machine, so
// there are several attempts.
TEST(KinetoClock, is_the_profiles) {
  constexpr std::int64_t kWithin = 50'000;  // ns
  constexpr int kAttempts = 10;
  int within = 0;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    profile::Kineto kineto;
    ASSERT_EQ(kineto.start(profile::Kineto::Of::operators), std::nullopt);
    auto input = torch::ones({64, 64});
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const auto before = profile::steady_now();
    at::mm(input, input);
    const auto after = profile::steady_now();
    const auto activities = kineto.stop();
    ASSERT_TRUE(activities);
    int seen = 0;
    for (const auto& each : activities->operators) {
      if (each.name != "aten::mm") continue;
      ++seen;
      within += kineto.clock().steady(each.begin) >= before - kWithin &&
                kineto.clock().steady(each.end) <= after + kWithin;
    }
    EXPECT_EQ(seen, 1);
    EXPECT_FALSE(kineto.running());
    EXPECT_EQ(kineto.stop(), std::nullopt);
  }
  // LibTorch's conversion to the epoch is less accurate if the thread was preempted during its calibration.
  EXPECT_GT(within, kAttempts / 2);
}

TEST(KinetoOperators, of_all_threads_are_there) {
  profile::Kineto kineto;
  ASSERT_EQ(kineto.start(profile::Kineto::Of::operators), std::nullopt);
  at::mm(torch::ones({4, 4}), torch::ones({4, 4}));
  std::thread([] { at::mm(torch::ones({4, 4}), torch::ones({4, 4})); }).join();
  std::optional<profile::Activities> activities;
  std::thread([&] { activities = kineto.stop(); }).join();  // a failing operation's thread may stop it
  ASSERT_TRUE(activities);
  std::set<std::int64_t> threads;
  for (const auto& each : activities->operators)
    if (each.name == "aten::mm") threads.insert(each.thread);
  EXPECT_EQ(threads.size(), 2u);
}

TEST(Kineto, of_somebody_else_is_left_alone) {
  namespace theirs = torch::autograd::profiler;
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  theirs::prepareProfiler(config, {torch::profiler::impl::ActivityType::CPU});
  theirs::enableProfiler(config, {torch::profiler::impl::ActivityType::CPU});
  ::testing::internal::CaptureStderr();
  const auto profile = profile_of(OperatorSource::kineto, "theirs");
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("LibTorch's profiler is already running in this process"));
  EXPECT_GT(operators_of(profile).at("main aten::mm"), 0);  // recorded by callbacks
  const auto result = theirs::disableProfiler();
  EXPECT_FALSE(result->events().empty());
}

TEST(Kineto, may_be_asked_for_by_the_environment) {
  ::setenv("LOCKSTEP_PROFILE", "2:3", 1);
  ::setenv("LOCKSTEP_PROFILE_OPERATORS", "kinetto", 1);
  EXPECT_THROW(World::from_environment(), ConfigError);
  ::setenv("LOCKSTEP_PROFILE_OPERATORS", "none", 1);
  EXPECT_TRUE(operators_of(profile_of(OperatorSource::kineto, "environment")).empty());
  ::unsetenv("LOCKSTEP_PROFILE");
  ::unsetenv("LOCKSTEP_PROFILE_OPERATORS");
}

}  // namespace
}  // namespace lockstep

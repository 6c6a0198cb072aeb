// Summaries of profiles that are constructed by hand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/profile/record/recorder.h>
#include <lockstep/profile/report/merge.h>
#include <nlohmann/json.hpp>

#include "support/folder.h"

namespace lockstep::profile {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr std::int64_t kMs = 1'000'000;

// Builds the profile of a rank whose main thread does one thing after another.
struct Made {
  RankProfile profile;

  explicit Made(int rank, int size) {
    profile.rank = rank;
    profile.size = size;
    profile.host = "here";
    profile.boot = "boot";
    profile.program = "train";
    profile.origin = 1000 * kMs;
    profile.threads = {"main"};
    profile.groups = {{77, "world", rank, size}};
    profile.names = {"", "x", "bucket"};
  }
  Made& span(SpanKind kind, std::int64_t begin, std::int64_t end, int depth = 0, std::int64_t cpu_begin = -1,
             std::int64_t cpu_end = -1) {
    profile.events.push_back({.kind = kind,
                              .name = 1,
                              .depth = depth,
                              .begin = begin * kMs,
                              .end = end * kMs,
                              .cpu_begin = cpu_begin < 0 ? -1 : cpu_begin * kMs,
                              .cpu_end = cpu_end < 0 ? -1 : cpu_end * kMs});
    return *this;
  }
  Made& step(std::int64_t number, std::int64_t begin, std::int64_t end) {
    profile.steps.push_back({number, begin * kMs, end * kMs});
    return *this;
  }
  Made& reduce(std::uint64_t sequence, std::int64_t begin, std::int64_t end, std::int64_t bytes = 1000) {
    profile.transfers.push_back({.operation = Operation::all_reduce,
                                 .sequence = sequence,
                                 .bytes = bytes,
                                 .tag = 2,
                                 .begin = begin * kMs,
                                 .end = end * kMs});
    return *this;
  }
};

TEST(ProfileSummary, a_step_is_the_sum_of_its_parts) {
  Made rank(0, 1);
  rank.step(5, 0, 100)
      .span(SpanKind::range, 0, 0, 0, 0, 0)         // step border
      .span(SpanKind::data, 0, 10, 0, 0, 1)         // 10 of data
      .span(SpanKind::operation, 10, 40, 0, 1, 31)  // 30, including 20 of waiting
      .span(SpanKind::wait, 15, 35, 1)
      .span(SpanKind::optimizer, 40, 55, 0, 31, 46)  // 15, including 5 of waiting
      .span(SpanKind::operation, 42, 45, 1)
      .span(SpanKind::wait, 50, 55, 1)
      .span(SpanKind::pipeline, 55, 95)              // says only what for
      .span(SpanKind::operation, 60, 70, 1, 48, 58)  // a gap of 5 before it, with 2 of computing
      .span(SpanKind::operation, 80, 95, 1, 58, 73)  // a gap of 10, asleep
      .span(SpanKind::range, 100, 100, 0, 78, 78);   // a gap of 5, computing
  const auto summary = summarize({rank.profile});
  const auto& parts = summary.steps.at(0).parts;
  EXPECT_DOUBLE_EQ(parts.data, 10);
  EXPECT_DOUBLE_EQ(parts.communication, 25);
  EXPECT_DOUBLE_EQ(parts.optimizer, 10);
  EXPECT_DOUBLE_EQ(parts.compute, 10 + 10 + 15);
  EXPECT_DOUBLE_EQ(parts.code, 2 + 5);
  EXPECT_DOUBLE_EQ(parts.idle, 3 + 10);
  EXPECT_DOUBLE_EQ(parts.other, 0);
  EXPECT_DOUBLE_EQ(parts.sum(), 100);
}

TEST(ProfileSummary, what_was_not_measured_is_other) {
  Made rank(0, 1);
  rank.step(1, 0, 50).span(SpanKind::operation, 20, 40);
  const auto parts = summarize({rank.profile}).steps.at(0).parts;
  EXPECT_DOUBLE_EQ(parts.compute, 20);
  EXPECT_DOUBLE_EQ(parts.other, 30);
}

TEST(ProfileSummary, spans_over_the_border_of_a_step_count_in_both) {
  Made rank(0, 1);
  rank.step(1, 0, 50).step(2, 50, 100).span(SpanKind::operation, 40, 70);
  const auto steps = summarize({rank.profile}).steps;
  EXPECT_DOUBLE_EQ(steps.at(0).parts.compute, 10);
  EXPECT_DOUBLE_EQ(steps.at(1).parts.compute, 20);
}

TEST(ProfileSummary, of_a_wait_what_was_for_a_late_rank) {
  Made early(0, 2), late(1, 2);
  early.step(1, 0, 50).span(SpanKind::wait, 10, 40).reduce(0, 10, 40, 2'000'000);
  late.step(1, 0, 50).span(SpanKind::wait, 35, 40).reduce(0, 35, 40, 2'000'000);
  early.profile.events[0].transfer = late.profile.events[0].transfer = 0;
  const auto summary = summarize({early.profile, late.profile});
  EXPECT_DOUBLE_EQ(summary.each.at(0).waiting_ms, 25);
  EXPECT_DOUBLE_EQ(summary.each.at(1).waiting_ms, 0);
  EXPECT_DOUBLE_EQ(summary.steps.at(0).late_ms, 0);
  EXPECT_DOUBLE_EQ(summary.steps.at(1).late_ms, 25);
  EXPECT_EQ(summary.slowest_rank, 1);
  ASSERT_THAT(summary.collectives, SizeIs(1));
  EXPECT_EQ(summary.collectives[0].count, 1u);
  EXPECT_DOUBLE_EQ(summary.collectives[0].ms_median, 5);
  EXPECT_DOUBLE_EQ(summary.collectives[0].gb_per_s, 0.4);
  EXPECT_DOUBLE_EQ(summary.collectives[0].exposed_ms, (30 + 5) / 2.0);
  EXPECT_DOUBLE_EQ(summary.overlap_percent, 0);
  EXPECT_THAT(summary.hints, Contains(HasSubstr("rank 1")));
}

TEST(ProfileSummary, communication_behind_operators_is_overlapped) {
  Made rank(0, 1);
  rank.step(1, 0, 100).span(SpanKind::operation, 0, 90).span(SpanKind::wait, 90, 100).reduce(0, 60, 100);
  const auto summary = summarize({rank.profile});
  EXPECT_DOUBLE_EQ(summary.overall.transfer_ms, 40);
  EXPECT_DOUBLE_EQ(summary.overall.parts.communication, 10);
  EXPECT_DOUBLE_EQ(summary.overlap_percent, 75);
}

TEST(ProfileSummary, hints_have_their_evidence_and_are_at_most_three) {
  Made rank(0, 2), other(1, 2);
  for (auto* each : {&rank, &other})
    each->step(1, 0, 100)
        .span(SpanKind::data, 0, 20, 0, 0, 0)
        .span(SpanKind::wait, 20, 40, 0, 0, 0)
        .span(SpanKind::optimizer, 40, 70, 0, 0, 0)
        .span(SpanKind::operation, 90, 100, 0, 0, 0)
        .reduce(0, 20, 40);
  const auto hints = summarize({rank.profile, other.profile}).hints;
  ASSERT_THAT(hints, SizeIs(3));
  EXPECT_THAT(hints, Contains(HasSubstr("30 ms of each 100 ms step are spent in the optimizer")));
  EXPECT_THAT(hints, Contains(HasSubstr("20 ms of each 100 ms step are spent waiting for data")));
}

TEST(ProfileSummary, a_healthy_step_gets_no_hint) {
  Made rank(0, 1);
  rank.step(1, 0, 100).span(SpanKind::operation, 0, 97).span(SpanKind::wait, 97, 100);
  EXPECT_THAT(summarize({rank.profile}).hints, IsEmpty());
}

TEST(ProfileSummary, ranks_without_a_common_step_are_refused) {
  Made one(0, 2), two(1, 2);
  one.step(1, 0, 1);
  two.step(2, 0, 1);
  EXPECT_THROW(summarize({one.profile, two.profile}), ConfigError);
}

TEST(ProfileClocks, hosts_are_aligned_by_the_collectives_they_share) {
  Made here(0, 2), there(1, 2);
  there.profile.boot = "other";
  const std::int64_t ahead = 5'000'000 * kMs;
  there.profile.origin += ahead;
  // In true time both begin at 0; each rank's view of a collective is within 1 ms.
  for (int i = 0; i < 20; ++i) {
    here.reduce(static_cast<std::uint64_t>(i), 10 * i, 10 * i + 2 + i % 3);
    there.reduce(static_cast<std::uint64_t>(i), 10 * i + 1, 10 * i + 2 + i % 2);
  }
  std::vector profiles{here.profile, there.profile};
  const auto bounds = clock_bounds(profiles, "other", "boot");
  EXPECT_EQ(bounds.arrivals_of, 20u);
  EXPECT_LE(bounds.least, -ahead);
  EXPECT_GE(bounds.most, -ahead);
  align_clocks(profiles);
  EXPECT_NEAR(static_cast<double>(profiles[1].origin - profiles[0].origin), 0.0, 1.0 * kMs);
}

TEST(ProfileFile, comes_back_as_it_was) {
  const testing::Folder folder;
  Made rank(1, 3);
  rank.step(4, 0, 10).span(SpanKind::wait, 1, 2, 3, 4, 5).reduce(9, 1, 2);
  rank.profile.memory = {{5, 6}};
  rank.profile.notes = {{"pipeline", "0F0"}};
  rank.profile.names[1] = "a \"name\" \xff of bytes";
  const auto read_back = read(write(rank.profile, folder));
  EXPECT_EQ(read_back.rank, 1);
  EXPECT_EQ(read_back.names[2], "bucket");
  ASSERT_THAT(read_back.events, SizeIs(1));
  EXPECT_EQ(read_back.events[0].cpu_end, 5 * kMs);
  EXPECT_EQ(read_back.events[0].depth, 3);
  EXPECT_EQ(read_back.transfers.at(0).sequence, 9u);
  EXPECT_EQ(read_back.notes.at("pipeline"), "0F0");
  EXPECT_THAT(read_all(folder), SizeIs(1));
}

TEST(ProfileFile, what_is_wrong_with_one_is_told) {
  const testing::Folder scope;
  const auto folder = scope / "profile";
  EXPECT_THROW(read_all(folder), ConfigError);
  Made rank(0, 1);
  const auto path = write(rank.step(1, 0, 1).span(SpanKind::wait, 0, 1).profile, folder);
  std::ifstream in(path);
  const auto good = nlohmann::json::parse(in);
  const auto error_of = [&](const nlohmann::json& text) -> std::string {
    std::ofstream(path) << text.dump();
    try {
      read(path);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  auto bad = good;
  bad["events"][0][1] = 3;
  EXPECT_THAT(error_of(bad), HasSubstr("expected 0 to 2, got 3"));
  bad = good;
  bad["events"][0][5] = -5;
  EXPECT_THAT(error_of(bad), HasSubstr("expected"));
  bad = good;
  bad["events"][0][0] = 99;
  EXPECT_THAT(error_of(bad), HasSubstr("99"));
  bad = good;
  bad["format"] = "other";
  EXPECT_THAT(error_of(bad), HasSubstr("lockstep.profile/1"));
  bad = good;
  bad.erase("steps");
  EXPECT_THAT(error_of(bad), HasSubstr("steps"));
  EXPECT_THAT(error_of(nlohmann::json("text")), HasSubstr("rank-0.json"));
}

Call call_of(Operation operation, std::uint64_t sequence) {
  Call call;
  call.operation = operation;
  call.sequence = sequence;
  call.group = "world";
  call.group_key = 7;
  call.bytes = 100;
  return call;
}

TEST(ProfileRecorder, keeps_what_is_in_the_window) {
  Recorder recorder;
  recorder.begin(SpanKind::range, "open before", 0, {});
  recorder.begin(SpanKind::operation, "before", 0, {});
  recorder.end();
  recorder.start();
  recorder.begin(SpanKind::operation, "inside", 5, {});
  recorder.flops(11);
  recorder.end();
  recorder.end();  // ends the span opened before the window
  recorder.started(call_of(Operation::all_reduce, 1));
  recorder.ended(call_of(Operation::all_reduce, 1), false);
  recorder.started(call_of(Operation::all_reduce, 2));
  std::thread([&] {
    recorder.begin(SpanKind::operation, "elsewhere", 0, {});
    recorder.end();
  }).join();
  recorder.begin(SpanKind::wait, "open at the end", 0, {});
  recorder.step(3);
  const auto profile = recorder.stop();
  recorder.end();
  std::vector<std::string> names;
  for (const auto& event : profile.events)
    if (event.begin != event.end || event.kind != SpanKind::range)
      names.push_back(profile.names[static_cast<std::size_t>(event.name)]);
  EXPECT_THAT(names, ::testing::UnorderedElementsAre("inside", "elsewhere", "open at the end"));
  for (const auto& event : profile.events) EXPECT_GE(event.end, event.begin);
  EXPECT_THAT(profile.threads, SizeIs(2));
  EXPECT_THAT(profile.steps, SizeIs(1));
  ASSERT_THAT(profile.transfers, SizeIs(2));
  EXPECT_EQ(profile.transfers[0].bytes, 100);
  EXPECT_GE(profile.transfers[1].end, profile.transfers[1].begin);
}

TEST(ProfileRecorder, messages_are_counted_from_the_beginning_on_both_ends) {
  Recorder recorder;
  auto message = call_of(Operation::send, 0);
  message.root = 1;
  message.tag = "1";
  recorder.started(message);
  recorder.ended(message, false);
  recorder.start();
  message.sequence = 1;
  recorder.started(message);
  recorder.ended(message, false);
  const auto profile = recorder.stop();
  ASSERT_THAT(profile.transfers, SizeIs(1));
  EXPECT_EQ(profile.transfers[0].nth, 1);
}

TEST(ProfileRecorder, many_threads_at_once) {
  auto recorder = std::make_shared<Recorder>();
  detail::SpanListening listening(recorder, detail::SpanScope::process);
  recorder->start();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([] {
      for (int i = 0; i < 1000; ++i) {
        detail::Span outer(SpanKind::operation, "outer");
        detail::Span inner(SpanKind::wait, "inner");
      }
    });
  for (int i = 1; i <= 20; ++i) recorder->step(i);
  for (auto& thread : threads) thread.join();
  const auto profile = recorder->stop();
  std::size_t spans = 0;
  for (const auto& event : profile.events) spans += event.kind != SpanKind::range;
  EXPECT_EQ(spans, 8000u);
}

TEST(ProfileRecorder, threads_that_go_on_leave_a_file_that_can_be_read) {
  auto recorder = std::make_shared<Recorder>();
  const testing::Folder folder;
  detail::SpanListening listening(recorder, detail::SpanScope::process);
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&] {
      while (!stop) detail::Span span(SpanKind::operation, "busy");
    });
  for (int window = 0; window < 100; ++window) {
    recorder->start();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    const auto profile = recorder->stop();
    for (const auto& event : profile.events) ASSERT_GE(event.end, event.begin);
    if (window == 99) read(write(profile, folder));
  }
  stop = true;
  for (auto& thread : threads) thread.join();
}

TEST(ProfileRecorder, a_wait_that_began_before_the_operation_is_for_it) {
  Recorder recorder;
  recorder.start();
  recorder.begin(SpanKind::wait, "all_reduce", 100, {});
  recorder.started(call_of(Operation::all_reduce, 1));
  recorder.end();
  const auto profile = recorder.stop();
  ASSERT_THAT(profile.transfers, SizeIs(1));
  EXPECT_TRUE(profile.transfers[0].unfinished);
  EXPECT_EQ(profile.events.back().transfer, 0);
}

TEST(ProfileSummary, ranks_that_are_missing_or_doubled_are_told) {
  const testing::Folder folder;
  Made rank(1, 3);
  rank.step(7, 0, 10).step(7, 10, 20).span(SpanKind::operation, 0, 20);
  const auto path = write(rank.profile, folder);
  const auto summary = summarize(read_all(folder));
  EXPECT_THAT(summary.missing, ::testing::ElementsAre(0, 2));
  EXPECT_THAT(text_of(summary), HasSubstr("No profile from ranks 0, 2"));
  std::filesystem::copy(path, folder / "rank-1 (copy).json");
  EXPECT_THROW(read_all(folder), ConfigError);
}

TEST(ProfileSummary, a_step_that_one_rank_has_twice_and_another_never_is_not_common) {
  Made one(0, 2), two(1, 2);
  one.step(7, 0, 10).step(7, 10, 20).step(8, 20, 30);
  two.step(8, 20, 30);
  const auto summary = summarize({one.profile, two.profile});
  EXPECT_EQ(summary.num_steps, 1);
  EXPECT_EQ(summary.first_step, 8);
}

TEST(ProfileReport, a_page_cannot_be_ended_by_a_name) {
  Made rank(0, 1);
  rank.step(1, 0, 10).span(SpanKind::operation, 1, 5);
  rank.profile.names[1] = "</script><b>";
  const auto page = page_of(report_of(summarize({rank.profile}), {rank.profile}));
  EXPECT_EQ(page.find("</script><b>"), std::string::npos);
  EXPECT_NE(page.find("\\u003c/script>\\u003cb>"), std::string::npos);
  EXPECT_EQ(page.find("@LOCKSTEP_REPORT_DATA@"), std::string::npos);
}

TEST(Span, goes_to_the_threads_own_sink_first) {
  auto whole = std::make_shared<Recorder>(), own = std::make_shared<Recorder>();
  EXPECT_EQ(detail::span_sink(), nullptr);
  {
    detail::SpanListening process(whole, detail::SpanScope::process);
    EXPECT_EQ(detail::span_sink(), whole);
    {
      detail::SpanListening thread(own, detail::SpanScope::thread);
      EXPECT_EQ(detail::span_sink(), own);
      std::thread([&] { EXPECT_EQ(detail::span_sink(), whole); }).join();
    }
    EXPECT_EQ(detail::span_sink(), whole);
  }
  EXPECT_EQ(detail::span_sink(), nullptr);
}

}  // namespace
}  // namespace lockstep::profile

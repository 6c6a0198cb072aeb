// Conversion of Kineto's recording to a rank's profile, from hand-made activities; and arrivals at
// collectives.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <chrono>
#include <filesystem>
#include <fstream>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/profile/record/activities.h>
#include <lockstep/profile/record/recorder.h>
#include <lockstep/profile/report/arrivals.h>
#include <lockstep/profile/report/merge.h>
#include <nlohmann/json.hpp>

#include "support/folder.h"

namespace lockstep::profile {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

constexpr std::int64_t kMillisecond = 1'000'000;
constexpr std::int64_t kOrigin = 5000 * kMillisecond;       // on the steady clock
constexpr std::int64_t kEpoch = 1'800'000'000'000'000'000;  // the same moment since the epoch

const EpochClock kClock({kOrigin, kEpoch}, {kOrigin + 1000 * kMillisecond, kEpoch + 1000 * kMillisecond});

RankProfile made(int rank = 0, int size = 1) {
  RankProfile profile;
  profile.rank = rank;
  profile.size = size;
  profile.host = "here";
  profile.boot = "boot";
  profile.program = "train";
  profile.origin = kOrigin;
  profile.threads = {"main"};
  profile.thread_ids = {700};
  profile.names = {"", "x", "bucket"};
  profile.groups = {{77, "world", rank, size}};
  profile.steps = {{1, 0, 100 * kMillisecond}};
  return profile;
}

OperatorActivity op(const char* name, std::int64_t begin, std::int64_t end, std::uint64_t correlation = 0,
                    std::int64_t thread = 700) {
  return {name, thread, kEpoch + begin * kMillisecond, kEpoch + end * kMillisecond, correlation};
}

DeviceActivity kernel(const char* name, std::int64_t begin, std::int64_t end, std::int64_t stream = 7,
                      std::uint64_t correlation = 0, std::uint64_t linked = 0) {
  return {DeviceKind::kernel,          name,        0,     stream, kEpoch + begin * kMillisecond,
          kEpoch + end * kMillisecond, correlation, linked};
}

TEST(EpochClock, comes_to_the_steady_clock_also_where_the_other_was_slewed) {
  EXPECT_EQ(kClock.steady(kEpoch + 3), kOrigin + 3);
  EXPECT_EQ(kClock.steady(kEpoch - 3 * kMillisecond), kOrigin - 3 * kMillisecond);
  // Slewed by 100 us per second, like a clock that is being corrected.
  const EpochClock slewed({kOrigin, kEpoch},
                          {kOrigin + 10'000 * kMillisecond, kEpoch + 10'001 * kMillisecond});
  EXPECT_NEAR(static_cast<double>(slewed.steady(kEpoch + 10'001 * kMillisecond) - kOrigin),
              10'000.0 * kMillisecond, 10.0);
  EXPECT_NEAR(static_cast<double>(slewed.steady(kEpoch) - kOrigin), 0.0, 1.0);
  // Set forward by an hour: the first calibration is used.
  const EpochClock set({kOrigin, kEpoch}, {kOrigin + 10 * kMillisecond, kEpoch + 3'600'000 * kMillisecond});
  EXPECT_EQ(set.steady(kEpoch + 5), kOrigin + 5);
}

TEST(EpochClock, pairs_are_of_one_moment) {
  const auto pair = clock_pair();
  const auto epoch = std::chrono::duration_cast<std::chrono::nanoseconds>(
                         std::chrono::system_clock::now().time_since_epoch())
                         .count();
  const auto steady = EpochClock(pair, pair).steady(epoch);
  EXPECT_LE(steady, steady_now());
  EXPECT_LE(pair.steady, steady);
}

TEST(KinetoOperators, become_spans_of_their_threads) {
  auto profile = made();
  profile.events = {
      {.kind = SpanKind::range, .name = 1, .begin = 10 * kMillisecond, .end = 40 * kMillisecond}};
  Activities activities;
  activities.operators = {op("aten::mm", 20, 30), op("aten::empty", 21, 22), op("aten::add", 35, 41),
                          op("aten::early", -5, 5), op("aten::relu", 1, 2, 0, 800)};
  add_operators(profile, activities, kClock);
  std::map<std::string, Event> by_name;
  for (const auto& event : profile.events)
    by_name[profile.names[static_cast<std::size_t>(event.name)]] = event;
  EXPECT_THAT(by_name, SizeIs(5));  // omits the one that began before the window
  EXPECT_FALSE(by_name.contains("aten::early"));
  EXPECT_EQ(by_name["aten::mm"].begin, 20 * kMillisecond);
  EXPECT_EQ(by_name["aten::mm"].depth, 1);
  EXPECT_EQ(by_name["aten::empty"].depth, 2);
  EXPECT_EQ(by_name["aten::add"].end, 40 * kMillisecond);  // shortened, because the enclosing span has ended
  EXPECT_EQ(by_name["aten::relu"].thread, 1);
  EXPECT_EQ(profile.threads.at(1), "thread 800");
}

// The thread's CPU time is known only at step borders.
TEST(KinetoOperators, leave_the_rest_of_a_step_to_code_and_idle) {
  auto profile = made();
  profile.events = {{.kind = SpanKind::range, .name = 1, .cpu_begin = 0, .cpu_end = 0},
                    {.kind = SpanKind::range,
                     .name = 1,
                     .begin = 100 * kMillisecond,
                     .end = 100 * kMillisecond,
                     .cpu_begin = 70 * kMillisecond,
                     .cpu_end = 70 * kMillisecond}};
  Activities activities;
  activities.operators = {op("aten::mm", 10, 40), op("aten::inner", 15, 20), op("aten::mm", 60, 80)};
  add_operators(profile, activities, kClock);
  const auto parts = summarize({profile}).steps.at(0).parts;
  EXPECT_DOUBLE_EQ(parts.compute, 50);
  EXPECT_DOUBLE_EQ(parts.code, 20);  // 70 ms of CPU time, 50 of them in operators
  EXPECT_DOUBLE_EQ(parts.idle, 30);
  EXPECT_DOUBLE_EQ(parts.other, 0);
}

RankProfile with_device() {
  auto profile = made();
  profile.steps = {{1, 0, 100 * kMillisecond}, {2, 100 * kMillisecond, 200 * kMillisecond}};
  Activities activities;
  activities.operators = {op("aten::mm", 1, 5, 11), op("aten::copy_", 6, 9, 12)};
  activities.launches = {{700, kEpoch + 2 * kMillisecond, 501}};
  activities.device = {kernel("gemm", 10, 40, 7, 501, 11),  // launched at 2, inside aten::mm
                       kernel("gemm", 110, 130, 7),         // launch unknown
                       kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 30, 60, 20),
                       kernel("gemm", -20, -10), kernel("late", 205, 210)};
  activities.device.push_back({DeviceKind::copy, "Memcpy HtoD", 0, 7, kEpoch + 70 * kMillisecond,
                               kEpoch + 75 * kMillisecond, 502, 12});
  add_operators(profile, activities, kClock);
  add_device(profile, activities, kClock);
  return profile;
}

TEST(DeviceActivities, become_rows_of_devices_and_streams) {
  const auto profile = with_device();
  ASSERT_THAT(profile.device_rows, SizeIs(2));
  EXPECT_EQ(profile.device_rows[0].stream, 7);
  EXPECT_EQ(profile.device_rows[1].stream, 20);
  ASSERT_THAT(profile.device, SizeIs(4));  // without those before and after the window
  const auto& first = profile.device[0];
  EXPECT_EQ(first.begin, 10 * kMillisecond);
  EXPECT_EQ(profile.names[static_cast<std::size_t>(first.launched_by)], "aten::mm");
  EXPECT_EQ(first.thread, 0);
  EXPECT_EQ(first.launched, 2 * kMillisecond);  // time of the call
  const auto& copy = profile.device[2];
  EXPECT_EQ(copy.kind, DeviceKind::copy);
  EXPECT_EQ(copy.launched, 6 * kMillisecond + 3 * kMillisecond / 2);  // the operator's middle
  EXPECT_EQ(profile.device[3].thread, -1);
}

TEST(DeviceActivities, a_launch_outside_of_all_spans_has_no_arrow) {
  auto profile = made();
  Activities activities;
  activities.operators = {op("aten::mm", 1, 5, 11)};  // not among the spans: operators come from callbacks
  activities.device = {kernel("gemm", 10, 40, 7, 501, 11)};
  add_device(profile, activities, kClock);
  ASSERT_THAT(profile.device, SizeIs(1));
  EXPECT_EQ(profile.device[0].thread, -1);
  EXPECT_EQ(profile.names[static_cast<std::size_t>(profile.device[0].launched_by)], "aten::mm");
}

TEST(DeviceSummary, busy_time_kernels_and_exposed_communication) {
  const auto summary = summarize({with_device()});
  ASSERT_TRUE(summary.each.at(0).device);
  const auto& device = *summary.each[0].device;  // over two steps
  EXPECT_DOUBLE_EQ(device.busy_ms, (50 + 5 + 20) / 2.0);
  EXPECT_DOUBLE_EQ(device.kernel_ms, (30 + 30 + 20) / 2.0);
  EXPECT_DOUBLE_EQ(device.copy_ms, 5 / 2.0);
  EXPECT_DOUBLE_EQ(device.communication_ms, 30 / 2.0);
  EXPECT_DOUBLE_EQ(device.exposed_ms, 20 / 2.0);  // the product ran at the same time for 10
  ASSERT_THAT(device.top, SizeIs(2));
  EXPECT_EQ(device.top[0].name, "gemm");
  EXPECT_EQ(device.top[0].count, 2u);
  EXPECT_DOUBLE_EQ(device.top[0].total_ms, 50);
  const auto json = json_of(summary);
  EXPECT_DOUBLE_EQ(json["ranks"][0]["device"]["exposed_ms"].get<double>(), 10);
  EXPECT_EQ(json["overall"]["device"]["top_kernels"][1]["count"], 1);
  EXPECT_THAT(text_of(summary), HasSubstr("gemm"));
  EXPECT_THAT(text_of(summary), HasSubstr("ncclDevKernel_AllReduce"));
  EXPECT_FALSE(summarize({made()}).each[0].device);
  EXPECT_THAT(text_of(summarize({made()})), Not(HasSubstr("kernel")));
}

TEST(DeviceSummary, a_host_that_waits_for_a_busy_device_is_no_trouble) {
  Summary summary;
  summary.overall.step_mean = 100;
  summary.overall.parts.idle = 60;
  summary.overall.parts.code = 20;
  EXPECT_THAT(hints_for(summary), SizeIs(2));
  summary.overall.device.emplace();
  summary.overall.device->busy_ms = 97;
  EXPECT_THAT(hints_for(summary), SizeIs(0));
  summary.overall.device->busy_ms = 30;
  EXPECT_THAT(hints_for(summary)[0], HasSubstr("the device is idle for 70 ms of each 100 ms step"));
}

// Backward runs on autograd's own thread while the calling thread sleeps.
TEST(DeviceSummary, backward_on_another_thread_is_computing) {
  auto profile = made();
  profile.threads = {"main", "autograd", "loader"};
  profile.names.push_back("autograd::engine::evaluate_function: AddmmBackward0");
  profile.names.push_back("aten::stack");
  const auto event = [](int name, int thread, std::int64_t begin, std::int64_t end, std::int64_t cpu) {
    return Event{.kind = SpanKind::operation,
                 .name = name,
                 .thread = thread,
                 .begin = begin * kMillisecond,
                 .end = end * kMillisecond,
                 .cpu_begin = cpu < 0 ? -1 : cpu * kMillisecond,
                 .cpu_end = cpu < 0 ? -1 : (cpu + end - begin) * kMillisecond};
  };
  // The main thread computes for 10 ms, sleeps for 80 and computes for 10.
  profile.events = {event(1, 0, 0, 10, 0), event(3, 1, 20, 60, -1), event(4, 2, 60, 90, -1),
                    event(1, 0, 90, 100, 10)};
  const auto parts = summarize({profile}).overall.parts;
  EXPECT_DOUBLE_EQ(parts.compute, 10 + 40 + 10);
  EXPECT_DOUBLE_EQ(parts.idle, 40);  // a loader's thread does not count
}

TEST(DeviceSummary, knows_nccl_by_its_kernels) {
  EXPECT_TRUE(is_communication("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, ...)"));
  EXPECT_TRUE(is_communication("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"));
  EXPECT_FALSE(is_communication("void at::native::vectorized_elementwise_kernel<4, ncclDev>()"));
}

nlohmann::json trace_of(const std::vector<RankProfile>& profiles) {
  const testing::Folder folder;
  const auto path = folder / "trace.json.gz";
  write_trace(profiles, path);
  const auto file = ::gzopen(path.c_str(), "rb");
  std::string text(1 << 20, '\0');
  text.resize(static_cast<std::size_t>(std::max(0, ::gzread(file, text.data(), 1 << 20))));
  ::gzclose(file);
  return nlohmann::json::parse(text)["traceEvents"];
}

TEST(DeviceTrace, has_a_thread_for_each_stream_and_arrows_from_operators) {
  const auto events = trace_of({with_device()});
  std::map<std::string, int> threads;
  std::map<int, std::pair<nlohmann::json, nlohmann::json>> arrows;
  for (const auto& event : events) {
    if (event["ph"] == "M" && event["name"] == "thread_name") threads[event["args"]["name"]] = event["tid"];
    if (event["ph"] == "s") arrows[event["id"]].first = event;
    if (event["ph"] == "f") arrows[event["id"]].second = event;
  }
  ASSERT_TRUE(threads.contains("GPU 0 stream 7") && threads.contains("GPU 0 stream 20"));
  ASSERT_THAT(arrows, SizeIs(2));
  const auto& [from, to] = arrows.begin()->second;
  EXPECT_EQ(from["tid"], threads["main"]);
  EXPECT_DOUBLE_EQ(from["ts"], 2000);
  EXPECT_EQ(to["tid"], threads["GPU 0 stream 7"]);
  EXPECT_DOUBLE_EQ(to["ts"], 10'000);
  const auto product =
      std::find_if(events.begin(), events.end(), [](const auto& e) { return e["name"] == "gemm"; });
  EXPECT_EQ((*product)["cat"], "kernel");
  EXPECT_EQ((*product)["args"]["operator"], "aten::mm");
}

TEST(DeviceReport, has_them_in_its_timeline) {
  const auto profile = with_device();
  const auto report = report_of(summarize({profile}), {profile});
  const auto& rank = report["timeline"]["ranks"][0];
  EXPECT_EQ(rank["streams"].size(), 2u);
  std::size_t kernels = 0;
  for (const auto& event : rank["events"])
    kernels += report["timeline"]["kinds"][event[0].get<int>()] == "kernel";
  EXPECT_EQ(kernels, 2u);  // NCCL's kernel counts as communication
}

TEST(DeviceFile, comes_back_as_it_was_and_what_is_wrong_is_told) {
  const testing::Folder folder;
  const auto profile = with_device();
  const auto path = write(profile, folder);
  const auto back = read(path);
  ASSERT_THAT(back.device, SizeIs(profile.device.size()));
  for (std::size_t i = 0; i < back.device.size(); ++i) {
    const auto &a = back.device[i], &b = profile.device[i];
    EXPECT_EQ(std::tuple(a.kind, a.name, a.row, a.begin, a.end, a.launched_by, a.thread, a.launched),
              std::tuple(b.kind, b.name, b.row, b.begin, b.end, b.launched_by, b.thread, b.launched));
  }
  EXPECT_EQ(back.device_rows.at(1).stream, 20);
  std::ifstream in(path);
  const auto good = nlohmann::json::parse(in);
  for (const int place : {0, 1, 2, 5, 6}) {  // kind, name, row, operator, thread
    auto bad = good;
    bad["device"][0][place] = 99;
    std::ofstream(path) << bad.dump();
    EXPECT_THROW(read(path), ConfigError) << place;
  }
}

RankProfile arriving(int rank, int size, std::int64_t at) {
  auto profile = made(rank, size);
  for (std::uint64_t i = 0; i < 2; ++i)
    profile.transfers.push_back({.operation = Operation::all_reduce,
                                 .sequence = i,
                                 .bytes = 1000,
                                 .tag = 2,
                                 .begin = (static_cast<std::int64_t>(i) * 40 + at) * kMillisecond,
                                 .end = (static_cast<std::int64_t>(i) * 40 + 39) * kMillisecond});
  return profile;
}

TEST(Arrivals, of_every_rank_after_the_first) {
  auto late = arriving(2, 3, 25);
  late.transfers[1].begin -= 5 * kMillisecond;
  const std::vector profiles{arriving(0, 3, 10), arriving(1, 3, 5), late};
  const auto summary = summarize(profiles);
  ASSERT_THAT(summary.collectives, SizeIs(1));
  const auto& arrivals = summary.collectives[0].arrivals;
  ASSERT_THAT(arrivals, SizeIs(3));
  EXPECT_DOUBLE_EQ(arrivals[0].mean_ms, 5);
  EXPECT_DOUBLE_EQ(arrivals[1].mean_ms, 0);
  EXPECT_DOUBLE_EQ(arrivals[2].mean_ms, 17.5);
  EXPECT_DOUBLE_EQ(arrivals[2].most_ms, 20);
  EXPECT_EQ(arrivals[2].last_times, 2u);
  EXPECT_EQ(arrivals[0].last_times, 0u);
  EXPECT_EQ(json_of(summary)["collectives"][0]["arrivals"][2]["rank"], 2);
  int seen = 0;
  for (const auto& event : trace_of(profiles))
    if (event["ph"] == "X" && event["cat"] == "communication" && event["args"]["sequence"] == 0) {
      EXPECT_EQ(event["args"]["arrival_ms"], (nlohmann::json{{"0", 5.0}, {"1", 0.0}, {"2", 20.0}}));
      ++seen;
    }
  EXPECT_EQ(seen, 3);
}

TEST(Arrivals, of_many_ranks_only_the_ends) {
  Arrivals arrivals;
  for (int rank = 0; rank < 64; ++rank) arrivals.ranks.push_back({rank, (rank + 7) % 64 * kMillisecond});
  EXPECT_EQ(arrival_text(arrivals), R"({"first":57,"last":56,"last_after":63.000})");
}

}  // namespace
}  // namespace lockstep::profile

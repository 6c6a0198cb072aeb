// The files of log_metric. tests/cli/metrics_test.py checks that TensorBoard reads them.
#include <lockstep/metrics/metric_log.h>

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <thread>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/metrics/event_file.h>

#include "support/errors.h"

namespace lockstep::detail {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class MetricLogTest : public ::testing::Test {
 protected:
  MetricLogTest() {
    char name[] = "/tmp/lockstep-metrics-XXXXXX";
    folder = ::mkdtemp(name);
  }
  ~MetricLogTest() override {
    set_log_sink(nullptr);
    fs::remove_all(folder);
  }
  std::vector<std::string> lines(const std::string& name) const {
    std::vector<std::string> found;
    std::ifstream in(folder + "/" + name);
    for (std::string line; std::getline(in, line);) found.push_back(line);
    return found;
  }
  static std::vector<fs::path> event_files(const std::string& in) {
    std::vector<fs::path> found;
    if (fs::exists(in))
      for (const auto& entry : fs::directory_iterator(in))
        if (entry.path().filename().string().starts_with("events.out.tfevents."))
          found.push_back(entry.path());
    return found;
  }

  std::string folder;
};

// RFC 3720, B.4.
TEST(Crc32c, has_the_values_of_the_standard) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  std::string up, down;
  for (int i = 0; i < 32; ++i) up += static_cast<char>(i), down += static_cast<char>(31 - i);
  EXPECT_EQ(crc32c(up), 0x46dd794eu);
  EXPECT_EQ(crc32c(down), 0x113fdb5cu);
  EXPECT_EQ(crc32c(""), 0u);
}

TEST(EventFile, has_records_of_events) {
  const auto record = tf_record("abc");
  EXPECT_EQ(record.size(), 8u + 4 + 3 + 4);
  EXPECT_EQ(record.substr(0, 8), std::string("\3\0\0\0\0\0\0\0", 8));
  // wall_time 1.0, step 300, value {tag "a", simple_value 0.5}.
  const std::string event(
      "\x09\0\0\0\0\0\0\xf0\x3f"
      "\x10\xac\x02"
      "\x2a\x0a\x0a\x08\x0a\x01\x61\x15\0\0\0\x3f",
      24);
  EXPECT_EQ(scalar_event(1.0, 300, "a", 0.5), tf_record(event));
  EXPECT_EQ(event_file_name(1700000000.5, "here", 7, 0), "events.out.tfevents.1700000000.here.7.0");
}

TEST(MetricLine, is_json_or_csv) {
  using enum MetricFormat;
  EXPECT_EQ(metric_line(jsonl, 1.5, 2, 7, "loss", 0.25),
            R"({"time":1.500000,"rank":2,"step":7,"name":"loss","value":0.25})");
  EXPECT_EQ(metric_line(jsonl, 1.5, 0, std::nullopt, R"(a "b" \)", 1e300),
            R"({"time":1.500000,"rank":0,"step":null,"name":"a \"b\" \\","value":1e+300})");
  EXPECT_EQ(metric_line(csv, 1.5, 2, 7, "loss", 0.1), "1.500000,2,7,loss,0.1");
  EXPECT_EQ(metric_line(csv, 1.5, 2, std::nullopt, R"(a,"b")", 3), R"(1.500000,2,,"a,""b""",3)");
  const double infinity = std::numeric_limits<double>::infinity();
  for (double value : {std::nan(""), infinity, -infinity})
    EXPECT_THAT(metric_line(jsonl, 0, 0, 0, "x", value), HasSubstr("\"value\":null}"));
  EXPECT_EQ(metric_line(csv, 0, 0, 0, "x", std::nan("")), "0.000000,0,0,x,nan");
  EXPECT_EQ(metric_line(csv, 0, 0, 0, "x", -infinity), "0.000000,0,0,x,-inf");
}

TEST(MetricName, that_files_cannot_hold_is_refused) {
  for (const std::string name : {"loss", "a b", "Verlust/\xc3\xa4", "\xe6\x90\x8d", "\xf0\x9f\x98\x80"})
    EXPECT_NO_THROW(check_metric_name(name)) << name;
  EXPECT_NO_THROW(check_metric_name(std::string(256, 'a')));
  for (const std::string name :
       {"", "a\nb", "\r", "a\tb", "\x7f", "\xff", "\xc3", "\xc0\xaf", "\xed\xa0\x80"})
    EXPECT_THROW(check_metric_name(name), ConfigError) << name;
  EXPECT_THROW(check_metric_name(std::string(257, 'a')), ConfigError);
  EXPECT_THROW(check_metric_name(std::string_view("a\0b", 3)), ConfigError);
}

TEST_F(MetricLogTest, has_files_for_rank_0_at_once_and_for_others_when_they_log) {
  MetricLog first(folder + "/new/deep", MetricFormat::jsonl, 0),
      third(folder + "/new/deep", MetricFormat::jsonl, 3);
  EXPECT_THAT(lines("new/deep/metrics.jsonl"), IsEmpty());
  EXPECT_TRUE(fs::exists(folder + "/new/deep/metrics.jsonl"));
  EXPECT_THAT(event_files(folder + "/new/deep"), SizeIs(1));
  EXPECT_FALSE(fs::exists(folder + "/new/deep/metrics.rank-3.jsonl"));
  first.add("loss", 0.5, 1);
  third.add("loss", 0.75, 1);
  EXPECT_THAT(lines("new/deep/metrics.jsonl"), ElementsAre(HasSubstr("0.5")));
  EXPECT_THAT(lines("new/deep/metrics.rank-3.jsonl"), ElementsAre(HasSubstr("0.75")));
  EXPECT_THAT(event_files(folder + "/new/deep/rank-3"), SizeIs(1));
}

TEST_F(MetricLogTest, goes_on_with_lines_that_are_there_and_makes_another_event_file) {
  for (int i = 0; i < 3; ++i) MetricLog(folder, MetricFormat::csv, 0).add("loss", i, i);
  EXPECT_THAT(lines("metrics.csv"), ElementsAre("time,rank,step,name,value", HasSubstr(",0,0,loss,0"),
                                                HasSubstr(",0,1,loss,1"), HasSubstr(",0,2,loss,2")));
  EXPECT_THAT(event_files(folder), SizeIs(3));
  std::ofstream(folder + "/metrics.csv", std::ios::app) << "half a li";
  MetricLog(folder, MetricFormat::csv, 0).add("loss", 9, 9);
  EXPECT_THAT(lines("metrics.csv"), SizeIs(6)) << "the half line stays one";
}

TEST_F(MetricLogTest, takes_what_any_thread_gives) {
  {
    MetricLog log(folder, MetricFormat::jsonl, 0);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&log, t] {
        for (int i = 0; i < 250; ++i) log.add("thread" + std::to_string(t), i, i);
      });
    for (auto& thread : threads) thread.join();
  }
  const auto all = lines("metrics.jsonl");
  EXPECT_THAT(all, SizeIs(1000));
  for (const auto& line : all) EXPECT_TRUE(line.starts_with("{\"time\":") && line.ends_with("}")) << line;
}

TEST_F(MetricLogTest, says_at_the_start_what_cannot_be_written) {
  std::ofstream(folder + "/file") << "x";
  const auto fails = [](const std::string& where) {
    return error_of<ConfigError>([&] { MetricLog(where, MetricFormat::jsonl, 0); });
  };
  EXPECT_THAT(fails(folder + "/file"), HasSubstr("metrics: cannot create directory '" + folder + "/file': "));
  EXPECT_THAT(fails(folder + "/file/below"), HasSubstr("Not a directory"));
  EXPECT_THAT(fails("/proc/metrics"), HasSubstr("metrics: cannot create directory '/proc/metrics'"));
  fs::create_directory(folder + "/metrics.jsonl");
  EXPECT_THAT(fails(folder), HasSubstr("Is a directory"));
  EXPECT_THAT(error_of<ConfigError>([] { parse_metric_format("--metrics-format", "xml"); }),
              HasSubstr("--metrics-format: expected jsonl or csv, got 'xml'"));
}

// The disk fills up: one warning, and only whole lines.
TEST_F(MetricLogTest, goes_on_when_the_disk_is_full) {
  std::vector<std::string> said;
  set_log_sink([&](LogLevel, std::string_view line) { said.emplace_back(line); });
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  {
    MetricLog log(folder, MetricFormat::jsonl, 0);
    rlimit small = before;
    small.rlim_cur = 500;
    ::setrlimit(RLIMIT_FSIZE, &small);
    for (int i = 0; i < 100; ++i) log.add("loss", i, i);
    ::setrlimit(RLIMIT_FSIZE, &before);
    log.add("loss", 100, 100);
  }
  const auto all = lines("metrics.jsonl");
  EXPECT_LT(all.size(), 10u);
  for (const auto& line : all) EXPECT_TRUE(line.ends_with("}")) << line;
  EXPECT_THAT(all.back(), HasSubstr("\"step\":100,"));
  EXPECT_THAT(said,
              ElementsAre(HasSubstr("cannot write a metric, training continues"),
                          HasSubstr(std::to_string(101 - all.size()) + " metrics could not be written")));
}

}  // namespace
}  // namespace lockstep::detail

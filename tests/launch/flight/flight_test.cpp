// Verdicts on flight records, and the record's file.
#include <lockstep/launch/flight/flight_file.h>
#include <lockstep/launch/flight/flight_keeper.h>
#include <lockstep/launch/flight/flight_verdict.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>

#include <lockstep/base/error.h>

#include "support/errors.h"
#include "support/processor_time.h"

namespace lockstep::detail {
namespace {

using control::FlightEntry;
using control::FlightRecord;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using namespace ::lockstep::testing;
using Kind = FlightVerdict::Kind;

constexpr std::int64_t kWorld = 1, kPair = -2;
constexpr std::int64_t kSecond = 1'000'000'000;

// Ranks that each make one call a second, starting at the first.
struct Job {
  FlightRecord record;

  explicit Job(int size) {
    record.world_size = size;
    std::vector<int> all;
    for (int rank = 0; rank < size; ++rank) {
      all.push_back(rank);
      record.ranks[rank].pid = 100 + rank;
    }
    record.groups[kWorld] = {kWorld, "world", all};
  }
  FlightEntry& add(int rank, const FlightEntry& like, std::int64_t at_ns) {
    auto& log = record.ranks[rank].log;
    ++log.begun;
    log.entries.push_back(like);
    auto& entry = log.entries.back();
    entry.began_ns = at_ns;
    entry.ended_ns = at_ns + kSecond / 10;
    return entry;
  }
  FlightEntry& call(int rank, std::int64_t sequence, const std::string& operation, const std::string& site,
                    std::int64_t count = 1000) {
    FlightEntry entry{.key = kWorld, .operation = operation, .site = site, .sequence = sequence};
    if (operation != "barrier") entry.dtype = "float32", entry.count = count, entry.bytes = 4 * count;
    if (operation == "all_reduce") entry.reduction = "sum";
    if (operation == "broadcast") entry.peer = 0;
    return add(rank, entry, (10 + sequence) * kSecond);
  }
  FlightEntry& message(int rank, std::int64_t sequence, const std::string& operation, int peer,
                       const std::string& site, std::int64_t at_ns) {
    return add(rank,
               {.key = kWorld,
                .message = true,
                .operation = operation,
                .dtype = "float32",
                .site = site,
                .sequence = sequence,
                .count = 8,
                .bytes = 32,
                .peer = peer},
               at_ns);
  }
  // All ranks make these calls.
  void together(std::int64_t from, std::int64_t to) {
    for (auto sequence = from; sequence < to; ++sequence)
      for (auto& [rank, flight] : record.ranks) call(rank, sequence, "all_reduce", "train.cpp:42");
  }
  void open(int rank) { record.ranks[rank].log.entries.back().ended_ns = 0; }
  void fail(int rank) { record.ranks[rank].log.entries.back().failed = true; }
};

TEST(FlightVerdict, the_rank_whose_call_differs) {
  Job job(4);
  job.together(0, 41);
  for (int rank : {0, 1, 3}) job.call(rank, 41, "broadcast", "train.cpp:80");
  job.call(2, 41, "all_reduce", "train.cpp:88");
  for (int rank : {0, 1, 2, 3}) job.call(rank, 42, "barrier", rank == 2 ? "b.cpp:1" : "a.cpp:1");  // too late
  const auto verdict = judge(job.record);
  EXPECT_EQ(verdict.kind, Kind::differs);
  EXPECT_THAT(verdict.ranks, ElementsAre(2));
  EXPECT_EQ(verdict.sequence, 41);
  EXPECT_EQ(verdict.operation, "all_reduce");
  EXPECT_EQ(verdict.site, "train.cpp:88");
  EXPECT_EQ(
      verdict.text,
      "rank 2 diverged first: all_reduce #41 of group 'world' (float32, 1000 elements, sum) at train.cpp:88, "
      "where all other ranks called broadcast (float32, 1000 elements, root 0) at train.cpp:80");
}

TEST(FlightVerdict, every_part_of_a_call_counts) {
  auto changed = [](auto change) {
    Job job(3);
    job.together(0, 5);
    change(job.record.ranks[1].log.entries[3]);
    return judge(job.record);
  };
  EXPECT_THAT(changed([](FlightEntry& entry) { entry.dtype = "float16"; }).ranks, ElementsAre(1));
  EXPECT_THAT(changed([](FlightEntry& entry) { entry.count = 999; }).text,
              AllOf(HasSubstr("rank 1 diverged first: all_reduce #3"), HasSubstr("999 elements")));
  EXPECT_THAT(changed([](FlightEntry& entry) { entry.reduction = "max"; }).ranks, ElementsAre(1));
  EXPECT_THAT(changed([](FlightEntry& entry) { entry.peer = 2; }).ranks, ElementsAre(1));
  EXPECT_EQ(changed([](FlightEntry& entry) { entry.site = "b.cpp:1"; }).kind, Kind::agree)
      << "it may be elsewhere";
  Job gather(2);
  gather.call(0, 0, "all_gather", "a.cpp:1", 5);
  gather.call(1, 0, "all_gather", "a.cpp:1", 6);
  EXPECT_EQ(judge(gather.record).kind, Kind::agree) << "ranks may give different sizes";
}

TEST(FlightVerdict, of_two_ranks_that_differ_both_are_named) {
  Job job(2);
  job.together(0, 3);
  job.call(0, 3, "all_reduce", "a.cpp:1");
  job.call(1, 3, "barrier", "b.cpp:2");
  const auto verdict = judge(job.record);
  EXPECT_THAT(verdict.ranks, ElementsAre(0, 1));
  EXPECT_EQ(verdict.text,
            "ranks 0 and 1 diverged at #3 of group 'world': rank 0 called all_reduce (float32, 1000 "
            "elements, sum) at "
            "a.cpp:1, rank 1 called barrier at b.cpp:2");
}

TEST(FlightVerdict, a_rank_that_did_not_come) {
  Job job(3);
  job.together(0, 41);
  for (int rank : {0, 2}) {
    job.call(rank, 41, "all_reduce", "train.cpp:42");
    job.open(rank);
  }
  job.record.ranks[1].log.entries.back().site = "x.cpp:12";
  job.record.ranks[1].ended = {.pid = 101, .signal = SIGKILL};
  job.record.failure = {.rank = 1, .pid = 101, .cause = "was killed by signal 9 (SIGKILL)"};
  const auto verdict = judge(job.record);
  EXPECT_EQ(verdict.kind, Kind::did_not_come);
  EXPECT_THAT(verdict.ranks, ElementsAre(1));
  EXPECT_EQ(verdict.sequence, 41);
  EXPECT_EQ(verdict.site, "x.cpp:12");
  EXPECT_EQ(
      verdict.text,
      "rank 1 did not reach all_reduce #41 of group 'world' (float32, 1000 elements, sum) at train.cpp:42, "
      "where ranks 0 and 2 waited; its last operation was all_reduce #40 of group 'world' (float32, "
      "1000 elements, sum) at x.cpp:12, which ended 900.0 ms earlier; it was killed by signal 9 (SIGKILL)");
}

TEST(FlightVerdict, one_that_had_not_come_yet_when_another_died_is_not_blamed) {
  Job job(3);
  job.together(0, 2);
  job.call(0, 2, "all_reduce", "train.cpp:42");
  job.fail(0);
  job.record.ranks[1].ended = {.pid = 101, .signal = SIGTERM};
  job.record.failure = {.rank = 2, .pid = 102, .cause = "exited with status 3"};
  EXPECT_THAT(judge(job.record).ranks, ElementsAre(2));
  job.record.failure->rank = -1;  // A host was lost.
  const auto both = judge(job.record);
  EXPECT_THAT(both.ranks, ElementsAre(1, 2));
  EXPECT_THAT(both.text, Not(HasSubstr("SIGTERM"))) << "that was the launcher";
}

TEST(FlightVerdict, a_step_that_was_left_out_among_equal_calls_shows) {
  Job job(2);
  job.together(0, 9);
  for (auto& [rank, flight] : job.record.ranks)
    for (auto& entry : flight.log.entries)
      entry.step = entry.sequence + (rank == 1 && entry.sequence >= 4 ? 1 : 0);
  job.call(0, 9, "all_reduce", "train.cpp:42");
  job.open(0);
  EXPECT_THAT(judge(job.record).text,
              HasSubstr("; since all_reduce #4 it was at a different step: 5, while rank 0 was at 4"));
  job.record.ranks[1].log.entries.erase(job.record.ranks[1].log.entries.begin(),
                                        job.record.ranks[1].log.entries.begin() + 6);
  EXPECT_THAT(judge(job.record).text,
              HasSubstr("; since all_reduce #6 or earlier it was at a different step: 7,"));
}

TEST(FlightVerdict, a_rank_that_never_began_anything) {
  Job job(2);
  job.call(0, 0, "barrier", "a.cpp:1");
  job.open(0);
  const auto verdict = judge(job.record);
  EXPECT_THAT(verdict.ranks, ElementsAre(1));
  EXPECT_THAT(verdict.text,
              HasSubstr("rank 1 did not reach barrier #0 of group 'world' at a.cpp:1, where rank 0 "
                        "waited; its last operation: none"));
}

// Rank 0 waits in the world for 1, which waits in a pair for 2: that is the cause.
TEST(FlightVerdict, those_who_wait_themselves_are_not_to_blame) {
  Job job(3);
  job.record.groups[kPair] = {kPair, "pair", {1, 2}};
  job.together(0, 3);
  job.call(0, 3, "all_reduce", "train.cpp:42");
  job.open(0);
  job.add(1, {.key = kPair, .operation = "barrier", .site = "pair.cpp:7", .sequence = 0}, 20 * kSecond);
  job.open(1);
  const auto verdict = judge(job.record);
  EXPECT_THAT(verdict.ranks, ElementsAre(2));
  // By time: 0 began to wait first, and of the ranks it waits for only 2 is idle.
  EXPECT_EQ(verdict.group, "world");
  job.record.ranks[2].log.entries.back().ended_ns = 0;  // Now all wait.
  EXPECT_EQ(judge(job.record).group, "world");
}

TEST(FlightVerdict, of_several_groups_the_earliest_counts) {
  Job job(4);
  job.record.groups[kPair] = {kPair, "pair", {2, 3}};
  job.together(0, 3);
  const FlightEntry barrier{.key = kPair, .operation = "barrier", .site = "pair.cpp:7", .sequence = 0};
  job.add(2, barrier, 14 * kSecond);
  job.add(3, {.key = kPair, .operation = "all_reduce", .site = "pair.cpp:9", .sequence = 0}, 14 * kSecond);
  for (int rank : {0, 1, 2}) job.call(rank, 3, "barrier", "a.cpp:1");
  job.call(3, 3, "broadcast", "b.cpp:1");
  EXPECT_EQ(judge(job.record).group, "world");  // at 13 s
  for (auto& entry : job.record.ranks[2].log.entries)
    if (entry.key == kPair) entry.began_ns = 12 * kSecond;
  EXPECT_EQ(judge(job.record).group, "pair");
}

TEST(FlightVerdict, messages_without_a_partner) {
  Job job(2);
  job.message(0, 0, "send", 1, "pipe.cpp:1", 10 * kSecond);
  job.message(1, 0, "recv", 0, "pipe.cpp:2", 10 * kSecond);
  job.message(1, 1, "recv", 0, "pipe.cpp:3", 11 * kSecond);
  job.open(1);
  const auto verdict = judge(job.record);
  EXPECT_EQ(verdict.kind, Kind::no_partner);
  EXPECT_THAT(verdict.ranks, ElementsAre(0));
  EXPECT_EQ(verdict.site, "pipe.cpp:1");
  EXPECT_THAT(
      verdict.text,
      HasSubstr(
          "rank 0 did not send what rank 1 waited for in recv #1 of group 'world' (float32, 8 elements, from "
          "rank 0) at pipe.cpp:3 (1 of 2 begun); its last operation was send #0"));
  job.message(0, 1, "send", 1, "pipe.cpp:1", 11 * kSecond);
  job.open(0);
  EXPECT_EQ(judge(job.record).kind, Kind::agree);
}

TEST(FlightVerdict, what_has_been_written_over_is_held_against_nobody) {
  Job job(2);
  job.record.groups[kPair] = {kPair, "pair", {0, 1}};
  job.together(500, 600);
  job.record.ranks[1].log.begun = 5000;
  job.add(0, {.key = kPair, .operation = "barrier", .site = "pair.cpp:7", .sequence = 7}, 20 * kSecond);
  job.open(0);
  EXPECT_EQ(judge(job.record).kind, Kind::agree);
  job.record.ranks[1].log.begun = 100;
  EXPECT_EQ(judge(job.record).kind, Kind::did_not_come);
}

TEST(FlightVerdict, ranks_that_agree) {
  Job job(2);
  job.together(0, 3);
  EXPECT_EQ(judge(job.record).text, "the recorded calls of all ranks agree");
  EXPECT_THAT(judge(job.record).ranks, IsEmpty());
  job.record.failure = {
      .rank = 1, .pid = 7, .cause = "was killed by signal 9 (SIGKILL)", .where = "in all_reduce #2"};
  const auto verdict = judge(job.record);
  EXPECT_EQ(verdict.kind, Kind::ended);
  EXPECT_THAT(verdict.ranks, ElementsAre(1));
  EXPECT_EQ(verdict.sequence, 2);
  EXPECT_EQ(verdict.site, "train.cpp:42");
  EXPECT_EQ(verdict.text,
            "rank 1 was the first to end: rank 1 (pid 7) was killed by signal 9 (SIGKILL), in all_reduce #2; "
            "until then "
            "the recorded calls of all ranks agree");
  job.record.failure->rank = -1;
  EXPECT_EQ(judge(job.record).kind, Kind::agree) << "a host was lost";
  EXPECT_EQ(judge({}).kind, Kind::agree);
}

// ---- the file ---------------------------------------------------------------------------------------------

Job whole_job() {
  Job job(3);
  job.together(0, 2);
  job.message(0, 0, "send", 2, "pipe.cpp:1", 30 * kSecond);
  job.message(2, 0, "recv", -1, "pipe.cpp:2", 30 * kSecond);
  job.fail(2);
  job.call(1, 2, "broadcast", "a.cpp:1");
  job.open(1);
  job.record.ranks[0].ended = {.pid = 100, .status = 3};
  job.record.ranks[1].ended = {.pid = 101, .signal = SIGSEGV, .core = true, .note = "why"};
  job.record.ranks[0].error = "threw: \xff no UTF-8";
  job.record.ranks[2].log.entries[0].step = 12;
  job.record.failure = {
      .rank = 0, .pid = 100, .cause = "exited with status 3", .where = "after it", .step = 4, .status = 3};
  job.record.attempt = 2;
  return job;
}

TEST(FlightFile, what_is_written_is_read) {
  const auto job = whole_job();
  const auto text = flight_json(job.record);
  const auto read = parse_flight(text, "f.json");
  EXPECT_EQ(read.world_size, 3);
  EXPECT_EQ(read.attempt, 2);
  EXPECT_EQ(read.failure->text(), job.record.failure->text());
  EXPECT_EQ(read.groups.at(kWorld).name, "world");
  EXPECT_THAT(read.groups.at(kWorld).ranks, ElementsAre(0, 1, 2));
  ASSERT_EQ(read.ranks.size(), 3u);
  for (const auto& [rank, flight] : job.record.ranks) {
    EXPECT_EQ(read.ranks.at(rank).log.entries, flight.log.entries);
    EXPECT_EQ(read.ranks.at(rank).log.begun, flight.log.begun);
    EXPECT_EQ(read.ranks.at(rank).pid, flight.pid);
  }
  EXPECT_EQ(read.ranks.at(1).ended->text(), "was killed by signal 11 (SIGSEGV), core dumped: why");
  EXPECT_EQ(read.ranks.at(0).ended->status, 3);
  EXPECT_FALSE(read.ranks.at(2).ended);
  EXPECT_EQ(judge(read).text, judge(job.record).text);
  EXPECT_THAT(text, HasSubstr("\"kind\":\"" + std::string(name(judge(read).kind)) + '"'));
}

TEST(FlightFile, what_is_none_is_refused_with_a_reason) {
  auto error = [](const std::string& text) {
    return error_of<ConfigError>([&] { parse_flight(text, "f.json"); });
  };
  EXPECT_THAT(error("{"), HasSubstr("'f.json' is not a flight record of lockstep run: not JSON"));
  EXPECT_THAT(error("[]"), HasSubstr("expected an object"));
  EXPECT_THAT(error("{}"), HasSubstr("missing \"lockstep_flight_record\""));
  const auto good = flight_json(whole_job().record);
  auto changed = [&](const std::string& from, const std::string& to) {
    auto text = good;
    const auto at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return error(text.replace(at, from.size(), to));
  };
  EXPECT_THAT(changed("record\": 1,", "record\": 2,"),
              HasSubstr("/lockstep_flight_record: expected an integer from 1 to 1"));
  EXPECT_THAT(changed("\"sequence\":0", "\"sequence\":-1"),
              HasSubstr("/ranks/0/operations/0/sequence: expected an integer from 0"));
  EXPECT_THAT(changed("\"sequence\":0", "\"sequence\":0.5"), HasSubstr("expected an integer"));
  EXPECT_THAT(changed("\"sequence\":0", "\"sequence\":18446744073709551615"),
              HasSubstr("expected an integer"));
  EXPECT_THAT(changed("{\"rank\":2", "{\"rank\":1"), HasSubstr("/ranks/2: duplicate rank 1"));
  EXPECT_THAT(changed("{\"rank\":2", "{\"rank\":3"), HasSubstr("from 0 to 2"));
  EXPECT_THAT(changed("\"site\":\"train.cpp:42\"", "\"site\":7"), HasSubstr("expected a string"));
  EXPECT_THAT(changed("0000000000000001", "000000000000000x"), HasSubstr("expected a group's key"));
}

TEST(FlightFile, what_a_terminal_would_obey_is_not_passed_on) {
  auto job = whole_job();
  job.record.groups[kWorld].name = "a\x1b[31mb\n";
  const auto name = parse_flight(flight_json(job.record), "f").groups.at(kWorld).name;
  EXPECT_EQ(name, "a [31mb ");
  job.record.groups[kWorld].name =
      "a\xc2\x9b"
      "31mb \xc3\xa4 \xc2\xa9";  // U+009B is ESC [
  EXPECT_EQ(parse_flight(flight_json(job.record), "f").groups.at(kWorld).name, "a  31mb \xc3\xa4 \xc2\xa9");
}

// Peers are between two operations at that moment, and some wait for them.
TEST(FlightVerdict, a_killed_rank_is_to_blame_and_not_one_that_had_not_come_yet) {
  Job job(3);
  job.together(0, 5);
  for (int rank : {0, 2}) {
    job.call(rank, 5, "all_reduce", "train.cpp:42");
    job.open(rank);
  }
  job.record.ranks[2].ended = {.pid = 102, .signal = SIGKILL};
  job.record.failure = {.rank = 2, .pid = 102, .cause = "was killed by signal 9 (SIGKILL)"};
  auto verdict = judge(job.record);
  EXPECT_EQ(verdict.kind, Kind::ended);
  EXPECT_THAT(verdict.ranks, ElementsAre(2));
  // A rank that kept its peers waiting that long may be why this one was killed: both are reported.
  job.fail(0);
  job.record.ranks[0].log.entries.back().ended_ns = 20 * kSecond;
  verdict = judge(job.record);
  EXPECT_EQ(verdict.kind, Kind::did_not_come);
  EXPECT_THAT(verdict.ranks, ElementsAre(1));
  EXPECT_THAT(verdict.text, HasSubstr("; the job's failure: rank 2 (pid 102) was killed by signal 9"));
}

TEST(FlightVerdict, a_call_that_differs_counts_before_ranks_that_had_not_come_yet) {
  Job job(5);
  job.record.groups[kPair] = {kPair, "pair", {0, 1}};
  job.together(0, 5);
  job.add(0, {.key = kPair, .operation = "barrier", .site = "pair.cpp:7"}, 14 * kSecond);
  job.open(0);
  for (int rank : {2, 3, 4}) job.call(rank, 5, "all_reduce", "train.cpp:42", rank == 3 ? 999 : 1000);
  for (int rank : {2, 3, 4}) job.fail(rank);
  job.record.failure = {.rank = 4, .pid = 104, .cause = "threw"};
  const auto verdict = judge(job.record);
  EXPECT_EQ(verdict.kind, Kind::differs);
  EXPECT_THAT(verdict.ranks, ElementsAre(3));
}

TEST(FlightVerdict, of_ranks_that_wait_for_one_another_all_are_named) {
  Job job(3);
  job.record.groups[kPair] = {kPair, "pair", {1, 2}};
  job.together(0, 5);
  for (int rank : {0, 2}) job.call(rank, 5, "all_reduce", "train.cpp:42");
  job.add(1, {.key = kPair, .operation = "barrier", .site = "pair.cpp:7"}, 16 * kSecond);
  for (int rank : {0, 1, 2}) job.open(rank);
  const auto verdict = judge(job.record);
  EXPECT_EQ(verdict.kind, Kind::did_not_come);
  EXPECT_THAT(verdict.ranks, ElementsAre(1, 2));
  EXPECT_THAT(verdict.text,
              AllOf(HasSubstr("rank 1 did not reach all_reduce #5"),
                    HasSubstr("; these ranks wait for each other: rank 2 did not reach barrier #0 "
                              "of group 'pair' at pair.cpp:7, where rank 1 waited")));
}

// Groups that are created in each step, and are no longer known.
TEST(FlightVerdict, very_many_groups_take_no_time) {
  Job job(2);
  for (std::int64_t key = 10; key < 60'010; ++key)
    for (int rank : {0, 1})
      job.add(rank, {.key = key, .operation = "barrier", .site = "a.cpp:1"}, key * kSecond);
  const auto begin = thread_processor_time();
  EXPECT_EQ(judge(job.record).kind, Kind::agree);
  EXPECT_LT(thread_processor_time() - begin, std::chrono::seconds(10));
}

TEST(FlightFile, that_cannot_be_written_is_told_with_what_it_says_and_holds_nobody_up) {
  const auto folder = std::filesystem::temp_directory_path() / ("flight-pipe-" + std::to_string(::getpid()));
  std::filesystem::create_directory(folder);
  LaunchOptions plan;
  FlightKeeper keeper(plan);
  auto job = whole_job();
  job.record.attempt = 0;
  for (int i = 0; i < 1000; ++i) job.together(10 + i, 11 + i);  // More than a pipe holds.
  plan.flight_record = "/dev/full";
  keeper.take(job.record);
  const auto verdict = judge(job.record).text;
  EXPECT_THAT(keeper.save().value_or(""), HasSubstr("No space left on device; its verdict: " + verdict));
  plan.flight_record = (folder / "pipe").string();
  ASSERT_EQ(::mkfifo(plan.flight_record.c_str(), 0600), 0);
  const int reader = ::open(plan.flight_record.c_str(), O_RDONLY | O_NONBLOCK);  // Does not read.
  keeper.take(job.record);
  EXPECT_THAT(keeper.save().value_or(""), HasSubstr("Connection timed out; its verdict: " + verdict));
  ::close(reader);
  std::filesystem::remove_all(folder);
}

TEST(FlightFile, goes_where_it_was_asked_for_and_only_when_there_is_something_to_tell) {
  const auto folder = std::filesystem::temp_directory_path() / ("flight-test-" + std::to_string(::getpid()));
  std::filesystem::create_directory(folder);
  LaunchOptions plan;
  plan.log_directory = folder.string();
  FlightKeeper keeper(plan);
  EXPECT_EQ(keeper.save(), std::nullopt);
  auto job = whole_job();
  keeper.take(job.record);
  const auto line = keeper.save();
  ASSERT_TRUE(line);
  EXPECT_THAT(*line, HasSubstr("flight record in " + (folder / "flight.restart-2.json").string() + ": "));
  EXPECT_THAT(*line, HasSubstr(judge(job.record).text));
  EXPECT_TRUE(std::filesystem::exists(folder / "flight.restart-2.json"));
  EXPECT_EQ(keeper.save(), std::nullopt) << "once";

  plan.flight_record = (folder / "mine").string();
  job.record.attempt = 0;
  keeper.take(job.record);
  EXPECT_THAT(keeper.save().value_or(""), HasSubstr((folder / "mine").string() + ": "));
  // An earlier record must not be mistaken for this failure's.
  Job early(2);
  early.record.failure = {.rank = 1, .pid = 101, .cause = "exited with status 3"};
  keeper.take(early.record);
  EXPECT_THAT(keeper.save().value_or(""), HasSubstr("mine: rank 1 was the first to end: "));
  plan.flight_record = (folder / "no" / "mine").string();
  keeper.take(job.record);
  EXPECT_THAT(keeper.save().value_or(""),
              HasSubstr("cannot write the flight record to " + plan.flight_record));
  plan.flight_record = "none";
  keeper.take(job.record);
  EXPECT_EQ(keeper.save(), std::nullopt);
  plan.flight_record.clear();
  job.record.failure.reset();  // It was asked to stop.
  keeper.take(job.record);
  EXPECT_EQ(keeper.save(), std::nullopt);
  std::filesystem::remove_all(folder);
}

TEST(FlightFile, travels_between_hosts) {
  const auto job = whole_job();
  for (const auto& [rank, flight] : job.record.ranks) {
    const auto read = control::RankFlight::decode(flight.encode());
    EXPECT_EQ(read.log.entries, flight.log.entries);
    EXPECT_EQ(read.log.begun, flight.log.begun);
    EXPECT_EQ(read.error, flight.error);
    EXPECT_EQ(read.pid, flight.pid);
    EXPECT_EQ(read.ended.has_value(), flight.ended.has_value());
    const auto shorter = control::RankFlight::decode(flight.encode(1)).log.entries;
    ASSERT_EQ(shorter.size(), 1u);
    EXPECT_EQ(shorter[0], flight.log.entries.back());
  }
  auto payload = job.record.ranks.at(0).encode();
  payload.pop_back();
  EXPECT_THROW(control::RankFlight::decode(payload), control::FrameError);
}

}  // namespace
}  // namespace lockstep::detail

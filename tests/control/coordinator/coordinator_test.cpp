// The coordinator's decisions, without sockets or time: tests feed it messages of ranks and agents, and check
// its replies.
#include <lockstep/control/coordinator/coordinator.h>

#include <signal.h>

#include <thread>

#include "support/errors.h"

namespace lockstep::control {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

class CoordinatorTest : public ::testing::Test {
 protected:
  struct Sent {
    int node;
    Frame frame;
  };

  Coordinator make(Coordinator::Options options) {
    return Coordinator(
        options, {.send = [this](int node, Frame frame) { sent.push_back({node, std::move(frame)}); },
                  .order = [this](int node, Order order) { orders.emplace_back(node, std::move(order)); },
                  .say = [this](const std::string& line) { said.push_back(line); },
                  .flight = [this](FlightRecord record) { flights.push_back(std::move(record)); },
                  .status = [this](const Status& status) { statuses.push_back(status); }});
  }
  // A job of `lockstep run` on one host that all ranks have joined.
  Coordinator running(int ranks, int max_restarts = 0) {
    Coordinator coordinator = make({.num_nodes = 1, .launches = true, .max_restarts = max_restarts});
    coordinator.add_node(
        {.node = 0, .num_nodes = 1, .local_ranks = ranks, .version = "1", .address = "127.0.0.1"});
    all_come(coordinator, ranks);
    return coordinator;
  }
  void all_come(Coordinator& coordinator, int ranks, int attempt = 0) {
    for (int r = 0; r < ranks; ++r) come(coordinator, r, ranks, attempt);
    coordinator.receive(0, {.kind = Kind::group, .rank = 0, .payload = world(ranks).encode()});
  }
  static GroupMade world(int ranks) {
    GroupMade group{.key = 1, .name = "world", .ranks = {}};
    for (int r = 0; r < ranks; ++r) group.ranks.push_back(r);
    return group;
  }
  static Hello card(int rank, int size, int attempt = 0) {
    return {
        .rank = rank, .size = size, .pid = 100 + rank, .attempt = attempt, .version = "1", .host = "here"};
  }
  void come(Coordinator& coordinator, int rank, int size, int attempt = 0) {
    coordinator.receive(0,
                        {.kind = Kind::hello, .rank = rank, .payload = card(rank, size, attempt).encode()});
  }
  // The rank has begun collective number `sequence`, and waits for it if `waited_ms` is not negative.
  static void is_at(Coordinator& coordinator, int rank, std::int64_t sequence, std::int64_t waited_ms,
                    std::int64_t step = -1) {
    Rows rows{.step = step, .rows = {}};
    rows.rows.push_back({.key = 1,
                         .group = "world",
                         .sequence = sequence,
                         .operation = "all_reduce",
                         .site = "train.cpp:42",
                         .running = waited_ms >= 0,
                         .since_ms = 1200,
                         .waited_ms = waited_ms,
                         .waits_for = waited_ms >= 0 ? sequence : -1});
    coordinator.receive(0, {.kind = Kind::rows, .rank = rank, .payload = rows.encode()});
  }
  static void ends(Coordinator& coordinator, int rank, Ended how) {
    coordinator.receive(0, {.kind = Kind::rank_ended, .rank = rank, .payload = encode(how)});
  }
  static void fault(Coordinator& coordinator, int rank, Fault::Kind kind, const std::string& text) {
    coordinator.receive(0, {.kind = Kind::fault, .rank = rank, .payload = Fault{kind, text}.encode()});
  }
  std::vector<Frame> of_kind(Kind kind) const {
    std::vector<Frame> frames;
    for (const auto& each : sent)
      if (each.frame.kind == kind) frames.push_back(each.frame);
    return frames;
  }
  template <typename T>
  std::vector<T> orders_of() const {
    std::vector<T> found;
    for (const auto& [node, order] : orders)
      if (const auto* each = std::get_if<T>(&order)) found.push_back(*each);
    return found;
  }
  std::string verdict() const {
    const auto verdicts = of_kind(Kind::verdict);
    return verdicts.empty() ? "" : decode_failure(verdicts[0].payload).text();
  }

  std::vector<Sent> sent;
  std::vector<std::pair<int, Order>> orders;
  std::vector<std::string> said;
  std::vector<FlightRecord> flights;
  std::vector<Status> statuses;
};

TEST_F(CoordinatorTest, all_are_welcomed_when_the_last_has_come) {
  Coordinator coordinator = make({.num_nodes = 0, .launches = false});
  coordinator.add_node({.address = "127.0.0.1"});
  come(coordinator, 1, 3);
  come(coordinator, 0, 3);
  EXPECT_THAT(of_kind(Kind::welcome), IsEmpty());
  come(coordinator, 2, 3);
  ASSERT_THAT(of_kind(Kind::welcome), SizeIs(3));
  const auto welcome = Welcome::decode(of_kind(Kind::welcome)[2].payload);
  EXPECT_EQ(welcome.local_rank, 2);
  EXPECT_EQ(welcome.local_size, 3);
  EXPECT_EQ(welcome.address, "") << "all are on one host";
}

TEST_F(CoordinatorTest, hosts_are_told_their_addresses_where_there_are_several) {
  Coordinator coordinator = make({.num_nodes = 0, .launches = false});
  EXPECT_EQ(coordinator.add_node({.address = "10.0.0.1"}), 0);
  EXPECT_EQ(coordinator.add_node({.address = "10.0.0.2"}), 1);
  come(coordinator, 0, 2);
  coordinator.receive(1, {.kind = Kind::hello, .rank = 1, .payload = card(1, 2).encode()});
  ASSERT_THAT(of_kind(Kind::welcome), SizeIs(2));
  const auto welcome = Welcome::decode(of_kind(Kind::welcome)[1].payload);
  EXPECT_EQ(welcome.address, "10.0.0.2");
  EXPECT_EQ(welcome.local_rank, 0);
  EXPECT_THAT(welcome.nodes, ::testing::ElementsAre(0, 1));
}

TEST_F(CoordinatorTest, contradictions_are_refused_on_every_rank) {
  struct Case {
    Hello second;
    const char* text;
  };
  auto with = [](auto change) {
    Hello hello = card(1, 2);
    change(hello);
    return hello;
  };
  for (const Case& each :
       {Case{with([](Hello& hello) { hello.rank = 0; }), "two processes have RANK=0: process 100 on here"},
        Case{with([](Hello& hello) { hello.size = 3; }), "disagree on WORLD_SIZE"},
        Case{with([](Hello& hello) { hello.version = "2"; }), "different versions of lockstep"}}) {
    sent.clear();
    Coordinator coordinator = make({.num_nodes = 0, .launches = false});
    coordinator.add_node({});
    come(coordinator, 0, 2);
    coordinator.receive(0, {.kind = Kind::hello, .rank = each.second.rank, .payload = each.second.encode()});
    ASSERT_THAT(of_kind(Kind::refused), SizeIs(1)) << each.text;
    EXPECT_EQ(of_kind(Kind::refused)[0].rank, -1) << "to all";
    EXPECT_THAT(of_kind(Kind::refused)[0].payload, HasSubstr(each.text));
    EXPECT_THAT(of_kind(Kind::welcome), IsEmpty());
  }
}

TEST_F(CoordinatorTest, a_job_that_has_begun_is_not_disturbed_by_one_that_comes_late) {
  Coordinator coordinator = make({.num_nodes = 0, .launches = false});
  coordinator.add_node({.address = "10.0.0.1"});
  coordinator.add_node({.address = "10.0.0.2"});
  come(coordinator, 0, 2);
  come(coordinator, 1, 2);
  sent.clear();
  coordinator.receive(1, {.kind = Kind::hello, .rank = 0, .id = 7, .payload = card(0, 2).encode()});
  ASSERT_THAT(sent, SizeIs(1));
  EXPECT_EQ(sent[0].frame.id, 7);
  EXPECT_EQ(sent[0].node, 1) << "to the late one alone";
  EXPECT_THAT(sent[0].frame.payload, HasSubstr("two processes have RANK=0"));
  coordinator.receive(1,
                      {.kind = Kind::rank_ended, .rank = 0, .payload = encode(Ended{.pid = 9, .signal = 9})});
  coordinator.receive(1, {.kind = Kind::leave, .rank = 0});
  EXPECT_THAT(sent, SizeIs(1)) << "what it says before it hears so is not taken for the first one's";
}

TEST_F(CoordinatorTest, hosts_that_do_not_come_are_named) {
  Coordinator coordinator =
      make({.num_nodes = 3, .launches = true, .max_restarts = 0, .address = "a", .join_timeout = seconds(2)});
  coordinator.add_node({.node = 1, .num_nodes = 3, .local_ranks = 1});
  coordinator.tick(Clock::now());
  EXPECT_THAT(orders, IsEmpty());
  coordinator.tick(Clock::now() + seconds(3));
  ASSERT_THAT(orders_of<Finish>(), SizeIs(1));
  EXPECT_THAT(orders_of<Finish>()[0].why, HasSubstr("these did not join within 2.0 s: 0, 2"));
}

TEST_F(CoordinatorTest, a_job_that_is_stopped_before_it_starts_ends) {
  Coordinator coordinator = make({.num_nodes = 2, .launches = true});
  coordinator.add_node({.node = 0, .num_nodes = 2, .local_ranks = 1});
  coordinator.receive(0, {.kind = Kind::stop, .payload = Writer().number(SIGINT).take()});
  ASSERT_THAT(orders_of<Finish>(), SizeIs(1));
  EXPECT_EQ(orders_of<Finish>()[0].status, 130);
}

TEST_F(CoordinatorTest, those_who_are_missing_are_named_to_all) {
  Coordinator coordinator = make({.num_nodes = 0, .launches = false});
  coordinator.add_node({});
  come(coordinator, 0, 4);
  come(coordinator, 2, 4);
  coordinator.receive(0, {.kind = Kind::missing, .rank = 2});
  EXPECT_THAT(verdict(), AllOf(HasSubstr("these did not join: 1, 3"), HasSubstr("these did: 0, 2")));
}

TEST_F(CoordinatorTest, a_killed_rank_is_named_with_pid_signal_and_place) {
  Coordinator coordinator = running(4);
  is_at(coordinator, 2, 1841, 20, 12);
  ends(coordinator, 2, {.pid = 102, .status = {}, .signal = SIGKILL});
  EXPECT_EQ(verdict(),
            "rank 2 (pid 102) was killed by signal 9 (SIGKILL), in all_reduce #1841 of group 'world' at "
            "train.cpp:42, "
            "step 12");
  ASSERT_THAT(orders_of<Failed>(), SizeIs(1));
  coordinator.receive(0, {.kind = Kind::node_done});
  ASSERT_THAT(orders_of<Finish>(), SizeIs(1));
  EXPECT_EQ(orders_of<Finish>()[0].status, 137);
}

TEST_F(CoordinatorTest, a_rank_that_fails_in_an_operation_is_not_blamed_for_the_one_that_died) {
  Coordinator coordinator = running(3);
  fault(coordinator, 0, Fault::Kind::comm, "all_reduce #5: connection closed");
  ends(coordinator, 0, {.pid = 100, .status = 1});
  EXPECT_EQ(verdict(), "");
  ends(coordinator, 1, {.pid = 101, .status = {}, .signal = SIGSEGV});
  EXPECT_THAT(verdict(), HasSubstr("rank 1 (pid 101) was killed by signal 11 (SIGSEGV)"));
  EXPECT_THAT(of_kind(Kind::verdict), SizeIs(1));
}

TEST_F(CoordinatorTest, a_failed_operation_is_the_cause_where_nobody_died) {
  Coordinator coordinator = running(2);
  fault(coordinator, 0, Fault::Kind::comm, "all_reduce #5: deadline");
  ends(coordinator, 0, {.pid = 100, .status = 3});
  coordinator.tick(Clock::now() + milliseconds(600));
  EXPECT_THAT(verdict(), AllOf(HasSubstr("rank 0 (pid 100) exited with status 3"),
                               HasSubstr("all_reduce #5: deadline")));
}

TEST_F(CoordinatorTest, an_exceptions_text_is_the_cause_and_its_signal_the_status) {
  Coordinator coordinator = running(2);
  fault(coordinator, 1, Fault::Kind::exception, "the loss is not finite");
  ends(coordinator, 1, {.pid = 101, .status = {}, .signal = SIGABRT});
  EXPECT_THAT(verdict(), HasSubstr("rank 1 (pid 101) threw: the loss is not finite"));
  coordinator.receive(0, {.kind = Kind::node_done});
  EXPECT_EQ(orders_of<Finish>().at(0).status, 134);
}

TEST_F(CoordinatorTest, an_uncaught_error_of_an_operation_is_the_cause_where_nobody_died) {
  Coordinator coordinator = running(2);
  fault(coordinator, 0, Fault::Kind::uncaught_comm, "all_reduce #5: deadline");
  EXPECT_EQ(verdict(), "") << "it may be the doing of a rank that is about to end";
  coordinator.tick(Clock::now() + milliseconds(600));
  EXPECT_THAT(verdict(), HasSubstr("rank 0 (pid 100) threw: all_reduce #5: deadline"));
}

TEST_F(CoordinatorTest, the_same_exception_is_said_once_and_another_by_itself) {
  Coordinator coordinator = running(4);
  for (int r : {1, 0, 2})
    fault(coordinator, r, Fault::Kind::exception, "batch_size: expected at least 1, got 0");
  fault(coordinator, 3, Fault::Kind::exception, "no space left");
  EXPECT_THAT(verdict(), HasSubstr("rank 1 (pid 101) threw: batch_size"));
  ASSERT_THAT(said, SizeIs(1));
  EXPECT_EQ(said[0], "rank 3 (pid 103) threw as well: no space left");
}

TEST_F(CoordinatorTest, a_rank_that_ends_before_it_joins_is_told_to_those_who_wait) {
  Coordinator coordinator = make({.num_nodes = 1, .launches = true});
  coordinator.add_node({.node = 0, .num_nodes = 1, .local_ranks = 2});
  come(coordinator, 0, 2);
  ends(coordinator, 1, {.pid = 101, .status = 0});
  EXPECT_THAT(verdict(), HasSubstr("rank 1 (pid 101) exited with status 0 before it joined"));
}

TEST_F(CoordinatorTest, also_to_those_who_come_later) {
  Coordinator coordinator = make({.num_nodes = 1, .launches = true});
  coordinator.add_node({.node = 0, .num_nodes = 1, .local_ranks = 2});
  ends(coordinator, 1, {.pid = 101, .status = 0});
  EXPECT_EQ(verdict(), "") << "programs without a World end like that";
  come(coordinator, 0, 2);
  EXPECT_THAT(verdict(), HasSubstr("rank 1 (pid 101) exited with status 0 before it joined"));
}

TEST_F(CoordinatorTest, a_rank_that_leaves_is_no_failure_until_somebody_waits_for_it) {
  Coordinator coordinator = running(2);
  is_at(coordinator, 1, 4, -1);
  is_at(coordinator, 0, 4, 1000);  // All ranks had reached it: this one is only slow to notice.
  coordinator.receive(0, {.kind = Kind::leave, .rank = 1});
  ends(coordinator, 1, {.pid = 101, .status = 0});
  coordinator.tick(Clock::now());
  EXPECT_EQ(verdict(), "");
  is_at(coordinator, 0, 5, 1000);
  coordinator.tick(Clock::now());
  EXPECT_THAT(verdict(), AllOf(HasSubstr("rank 1 (pid 101) exited with status 0 while rank 0 waits for it"),
                               HasSubstr("all_reduce #5 of group 'world' at train.cpp:42")));
}

TEST_F(CoordinatorTest, a_rank_that_exits_inside_an_operation_has_failed) {
  Coordinator coordinator = running(2);
  is_at(coordinator, 1, 4, 10);
  ends(coordinator, 1, {.pid = 101, .status = 0});
  EXPECT_THAT(verdict(),
              HasSubstr("rank 1 (pid 101) exited with status 0 without leaving the job, in all_reduce #4"));
}

TEST_F(CoordinatorTest, who_is_waited_for_is_told_once_a_doubling) {
  Coordinator coordinator = running(4);
  // The coordinator reads the clock itself when a rank reports, so all reports must arrive quickly. On a busy
  // machine that may take several tries.
  Clock::time_point begin, start;
  do {
    begin = Clock::now();
    for (int r : {0, 1, 3}) is_at(coordinator, r, 8, 900);
    is_at(coordinator, 2, 7, -1, 3);
    start = Clock::now();
  } while (start - begin > milliseconds(20));
  coordinator.tick(start);
  EXPECT_THAT(said, IsEmpty());
  for (int ms = 200; ms < 8900; ms += 100) coordinator.tick(start + milliseconds(ms));
  ASSERT_THAT(said, SizeIs(4));  // After 1, 2, 4 and 8 s.
  EXPECT_THAT(said[0], AllOf(HasSubstr("has waited 1.1 s in all_reduce #8 of group 'world' at train.cpp:42"),
                             HasSubstr("missing: rank 2 (pid 102), last after all_reduce #7"),
                             HasSubstr("1.2 s ago"), HasSubstr("step 3"), Not(HasSubstr("rank 3 ("))));
}

TEST_F(CoordinatorTest, nothing_is_said_while_the_ranks_are_stopped_on_purpose) {
  Coordinator coordinator = running(2);
  is_at(coordinator, 0, 8, 900);
  is_at(coordinator, 1, 7, -1);
  const auto start = Clock::now();
  coordinator.paused(true);
  for (int ms = 0; ms < 5000; ms += 100) coordinator.tick(start + milliseconds(ms));
  coordinator.paused(false);
  coordinator.tick(start + milliseconds(5000));  // The late rank has only just been continued.
  EXPECT_THAT(said, IsEmpty());
  coordinator.tick(start + milliseconds(6500));
  EXPECT_THAT(said, SizeIs(1));
}

TEST_F(CoordinatorTest, nothing_is_said_of_a_wait_in_which_all_take_part) {
  Coordinator coordinator = running(2);
  is_at(coordinator, 0, 8, 5000);
  is_at(coordinator, 1, 8, 5000);
  coordinator.tick(Clock::now());
  EXPECT_THAT(said, IsEmpty());
}

TEST_F(CoordinatorTest, all_stop_at_the_call_that_the_furthest_makes_next) {
  Coordinator coordinator = running(2);
  coordinator.receive(0, {.kind = Kind::stop, .rank = 1, .payload = Writer().number(SIGTERM).take()});
  EXPECT_THAT(of_kind(Kind::stop_prepare), SizeIs(1));
  ASSERT_THAT(orders_of<Stop>(), SizeIs(1));
  auto counts = [&](int rank, int count) {
    coordinator.receive(0,
                        {.kind = Kind::stop_count, .rank = rank, .payload = Writer().number(count).take()});
  };
  counts(0, 17);
  EXPECT_THAT(of_kind(Kind::stop_at), IsEmpty());
  counts(1, 19);
  ASSERT_THAT(of_kind(Kind::stop_at), SizeIs(1));
  EXPECT_EQ(Reader(of_kind(Kind::stop_at)[0].payload).number(), 19);
  for (int r : {0, 1}) ends(coordinator, r, {.pid = 100 + r, .status = 0});
  coordinator.receive(0, {.kind = Kind::node_done});
  EXPECT_EQ(orders_of<Finish>().at(0).status, 143);
}

TEST_F(CoordinatorTest, a_rank_that_is_gone_is_not_asked_where_it_is) {
  Coordinator coordinator = running(2);
  coordinator.receive(0, {.kind = Kind::leave, .rank = 1});
  coordinator.receive(0, {.kind = Kind::stop, .rank = -1, .payload = Writer().number(SIGTERM).take()});
  coordinator.receive(0, {.kind = Kind::stop_count, .rank = 0, .payload = Writer().number(3).take()});
  EXPECT_THAT(of_kind(Kind::stop_at), SizeIs(1));
}

TEST_F(CoordinatorTest, a_job_starts_again_and_ends_when_it_comes_to_the_same_end) {
  Coordinator coordinator = running(2, /*max_restarts=*/3);
  auto fails_at = [&](std::int64_t step, int attempt) {
    if (attempt > 0) all_come(coordinator, 2, attempt);
    is_at(coordinator, 1, step, -1, step);
    ends(coordinator, 1, {.pid = 101, .status = {}, .signal = SIGSEGV});
    coordinator.receive(0, {.kind = Kind::node_done});
    coordinator.tick(Clock::now() + seconds(1));
  };
  fails_at(10, 0);
  ASSERT_THAT(orders_of<Start>(), SizeIs(2));
  EXPECT_EQ(orders_of<Start>()[1].attempt, 1);
  fails_at(20, 1);
  ASSERT_THAT(orders_of<Start>(), SizeIs(3));
  fails_at(20, 2);
  EXPECT_THAT(orders_of<Start>(), SizeIs(3));
  ASSERT_THAT(orders_of<Finish>(), SizeIs(1));
  EXPECT_THAT(orders_of<Finish>()[0].why,
              AllOf(HasSubstr("attempts 1 and 2 failed in the same way"), HasSubstr("step 20")));
  EXPECT_EQ(orders_of<Finish>()[0].status, 139);
}

TEST_F(CoordinatorTest, a_job_that_commits_steps_is_started_again_though_it_ends_at_the_same_count) {
  // A program that counts its steps from 0 in each attempt. In the last attempt it saves only before its
  // first step: no progress.
  Coordinator coordinator = running(2, /*max_restarts=*/9);
  const std::vector<std::int64_t> committed = {11, 11, 0};
  for (int attempt = 0; attempt < 3; ++attempt) {
    if (attempt > 0) all_come(coordinator, 2, attempt);
    const auto saved = committed[static_cast<std::size_t>(attempt)];
    coordinator.receive(0, {.kind = Kind::rows,
                            .rank = 0,
                            .payload = Rows{.step = 20, .committed = saved, .rows = {}}.encode()});
    is_at(coordinator, 1, 20, -1, 20);
    ends(coordinator, 1, {.pid = 101, .status = {}, .signal = SIGKILL});
    coordinator.receive(0, {.kind = Kind::node_done});
    coordinator.tick(Clock::now() + seconds(1));
    EXPECT_THAT(orders_of<Start>(), SizeIs(attempt < 2 ? attempt + 2 : 3));
  }
  ASSERT_THAT(orders_of<Finish>(), SizeIs(1));
  EXPECT_THAT(orders_of<Finish>()[0].why, HasSubstr("attempts 1 and 2 failed in the same way"));
}

TEST_F(CoordinatorTest, without_steps_each_checkpoint_is_progress) {
  Coordinator coordinator = running(2, /*max_restarts=*/9);
  for (int attempt = 0; attempt < 3; ++attempt) {
    if (attempt > 0) all_come(coordinator, 2, attempt);
    if (attempt < 2)
      coordinator.receive(
          0,
          {.kind = Kind::rows, .rank = 0, .payload = Rows{.step = -1, .committed = 0, .rows = {}}.encode()});
    is_at(coordinator, 1, 7, -1);
    ends(coordinator, 1, {.pid = 101, .status = {}, .signal = SIGKILL});
    coordinator.receive(0, {.kind = Kind::node_done});
    coordinator.tick(Clock::now() + seconds(1));
  }
  EXPECT_THAT(orders_of<Start>(), SizeIs(3));
  EXPECT_THAT(orders_of<Finish>(), SizeIs(1));
}

TEST_F(CoordinatorTest, an_older_attempt_is_refused) {
  Coordinator coordinator = running(2, 1);
  ends(coordinator, 1, {.pid = 101, .status = 1});
  coordinator.receive(0, {.kind = Kind::node_done});
  coordinator.tick(Clock::now() + seconds(1));
  come(coordinator, 0, 2, 0);
  ASSERT_THAT(of_kind(Kind::refused), SizeIs(1));
  EXPECT_THAT(of_kind(Kind::refused)[0].payload,
              HasSubstr("attempt 0 of the job, but the job is at attempt 1"));
}

TEST_F(CoordinatorTest, each_attempt_waits_longer_than_the_one_before) {
  Coordinator coordinator = running(2, /*max_restarts=*/20);
  auto fails = [&](int attempt) {
    if (attempt > 0) all_come(coordinator, 2, attempt);
    is_at(coordinator, 1, attempt, -1, attempt);
    ends(coordinator, 1, {.pid = 101, .status = 3});
    const auto before = Clock::now();
    coordinator.receive(0, {.kind = Kind::node_done});  // The pause begins within.
    return std::pair(before, Clock::now());
  };
  for (int attempt = 0; attempt < 10; ++attempt) {
    const auto [before, after] = fails(attempt);
    const auto pause = milliseconds(std::min(100 << attempt, 5000));
    coordinator.tick(before + pause - milliseconds(1));
    EXPECT_THAT(orders_of<Start>(), SizeIs(attempt + 1)) << "too soon";
    coordinator.tick(after + pause);
    ASSERT_THAT(orders_of<Start>(), SizeIs(attempt + 2));
  }
  fails(10);
  coordinator.receive(0, {.kind = Kind::stop, .payload = Writer().number(SIGINT).take()});
  ASSERT_THAT(orders_of<Finish>(), SizeIs(1)) << "nothing runs that could be waited for";
  EXPECT_EQ(orders_of<Finish>()[0].status, 130);
  coordinator.tick(Clock::now() + seconds(60));
  EXPECT_THAT(orders_of<Start>(), SizeIs(11));
}

TEST_F(CoordinatorTest, all_restarts_are_used_where_nobody_says_how_far_it_came) {
  Coordinator coordinator = running(2, /*max_restarts=*/3);
  for (int attempt = 0; attempt < 4; ++attempt) {
    if (attempt > 0) all_come(coordinator, 2, attempt);
    ends(coordinator, 1, {.pid = 101, .status = 3});
    coordinator.receive(0, {.kind = Kind::node_done});
    coordinator.tick(Clock::now() + seconds(10));
  }
  EXPECT_THAT(orders_of<Start>(), SizeIs(4));
  ASSERT_THAT(orders_of<Finish>(), SizeIs(1));
  EXPECT_THAT(orders_of<Finish>()[0].why, HasSubstr("all 3 restarts are used up"));
}

TEST_F(CoordinatorTest, failures_are_the_same_whatever_the_pids_and_times) {
  auto failure = [](const std::string& cause) {
    return Failure{.rank = 1, .pid = 7, .cause = cause, .where = {}, .step = 3};
  };
  const auto first =
      failure("exited with status 3: all_reduce #5 failed after 0.018 s: rank 0 (pid 17) has ended");
  EXPECT_TRUE(first.same_as(
      failure("exited with status 3: all_reduce #5 failed after 12.400 s: rank 0 (pid 4711) has ended")));
  EXPECT_FALSE(first.same_as(
      failure("exited with status 4: all_reduce #5 failed after 0.018 s: rank 0 (pid 17) has ended")));
  EXPECT_FALSE(first.same_as(
      failure("exited with status 3: all_reduce #6 failed after 0.018 s: rank 0 (pid 17) has ended")));
}

// Two ranks fail in an operation, and end at once.
TEST_F(CoordinatorTest, a_failed_operation_is_told_though_all_end_within_a_moment) {
  Coordinator coordinator = running(2);
  for (int r : {0, 1}) {
    fault(coordinator, r, Fault::Kind::comm, "recv #0: deadline");
    ends(coordinator, r, {.pid = 100 + r, .status = 3});
  }
  EXPECT_THAT(orders_of<Failed>(), IsEmpty());
  coordinator.receive(0, {.kind = Kind::node_done});
  ASSERT_THAT(orders_of<Failed>(), SizeIs(1));
  EXPECT_THAT(orders_of<Failed>()[0].failure.text(),
              HasSubstr("rank 0 (pid 100) exited with status 3: recv #0"));
  ASSERT_THAT(orders_of<Finish>(), SizeIs(1));
  EXPECT_EQ(orders_of<Finish>()[0].status, 3);
}

TEST_F(CoordinatorTest, who_caught_an_error_and_throws_another_is_told) {
  constexpr milliseconds kSuspicion(500);  // The coordinator's, by its own clock.
  for (bool in_time = false; !in_time;) {
    sent.clear();
    Coordinator coordinator = running(2);
    const auto begin = Clock::now();
    fault(coordinator, 1, Fault::Kind::comm, "recv #0: deadline");
    fault(coordinator, 1, Fault::Kind::unwinding, "");
    in_time = Clock::now() - begin < kSuspicion;  // Otherwise the machine is busy: retry.
    if (!in_time) continue;
    EXPECT_EQ(verdict(), "") << "most likely the same one";
    std::this_thread::sleep_for(kSuspicion + milliseconds(10));
    fault(coordinator, 1, Fault::Kind::exception, "the loss is not finite");
    EXPECT_THAT(verdict(), HasSubstr("rank 1 (pid 101) threw: the loss is not finite"));
  }
}

TEST_F(CoordinatorTest, a_long_text_keeps_its_beginning_and_harms_nobody) {
  Coordinator coordinator = running(2);
  fault(coordinator, 1, Fault::Kind::exception, "the cause" + std::string(200'000, 'x'));
  EXPECT_THAT(verdict(), AllOf(HasSubstr("rank 1 (pid 101) threw: the cause"), HasSubstr("bytes in all")));
  EXPECT_LT(verdict().size(), 10'000u);
  const auto order = decode_order(encode(Order(Failed{decode_failure(of_kind(Kind::verdict)[0].payload)})));
  EXPECT_THAT(std::get<Failed>(order).failure.text(), HasSubstr("the cause"));
  const auto finish = decode_order(encode(Order(Finish{.status = 1, .why = std::string(200'000, 'y')})));
  EXPECT_LT(std::get<Finish>(finish).why.size(), 40'000u);
}

TEST_F(CoordinatorTest, a_job_is_not_refused_for_one_that_contradicts_it_late) {
  Coordinator coordinator = make({.num_nodes = 0, .launches = false});
  coordinator.add_node({.address = "10.0.0.1"});
  come(coordinator, 0, 2);
  come(coordinator, 1, 2);
  auto late = [&](Hello hello) {
    sent.clear();
    coordinator.receive(0, {.kind = Kind::hello, .rank = hello.rank, .id = 7, .payload = hello.encode()});
    ASSERT_THAT(sent, SizeIs(1));
    EXPECT_EQ(sent[0].frame.kind, Kind::refused);
    EXPECT_EQ(sent[0].frame.id, 7) << "to the late one alone";
  };
  late(card(5, 6));
  auto newer = card(1, 2);
  newer.version = "2";
  late(newer);
  coordinator.receive(0, {.kind = Kind::leave, .rank = 1});
  late(newer);  // Its place is free, and the job continues.
  // Both join again: nothing is left of the earlier ones.
  coordinator.receive(0, {.kind = Kind::leave, .rank = 0});
  sent.clear();
  come(coordinator, 0, 2);
  come(coordinator, 1, 2);
  EXPECT_THAT(of_kind(Kind::welcome), SizeIs(2));
}

TEST_F(CoordinatorTest, nobody_is_missing_from_a_job_that_is_complete) {
  Coordinator coordinator = make({.num_nodes = 0, .launches = false});
  coordinator.add_node({});
  come(coordinator, 0, 2);
  come(coordinator, 1, 2);
  coordinator.receive(0, {.kind = Kind::missing, .rank = 0});  // The welcome was on its way.
  EXPECT_EQ(verdict(), "");
}

TEST_F(CoordinatorTest, the_longest_wait_that_can_be_said_is_told_and_over) {
  Coordinator coordinator = running(2);
  is_at(coordinator, 0, 8, 24 * 3600 * 1000);
  is_at(coordinator, 1, 7, -1);
  coordinator.tick(Clock::now());
  EXPECT_THAT(said, SizeIs(1));
  EXPECT_THROW(is_at(coordinator, 0, 8, INT64_MAX), FrameError);
}

TEST_F(CoordinatorTest, the_status_and_pid_are_those_of_who_ended) {
  Coordinator coordinator = running(2);
  is_at(coordinator, 0, 5, 1000);
  is_at(coordinator, 1, 4, -1);
  coordinator.receive(0, {.kind = Kind::leave, .rank = 1});
  fault(coordinator, 1, Fault::Kind::comm, "recv #0: deadline");
  ends(coordinator, 1, {.pid = 222, .status = 4});  // A wrapper's.
  coordinator.tick(Clock::now());
  EXPECT_THAT(verdict(), HasSubstr("rank 1 (pid 222) exited with status 4 while rank 0 waits for it"));
  coordinator.receive(0, {.kind = Kind::node_done});
  EXPECT_EQ(orders_of<Finish>().at(0).status, 4);
}

TEST_F(CoordinatorTest, a_lost_host_is_named_with_its_ranks) {
  Coordinator coordinator = make({.num_nodes = 2, .launches = true});
  coordinator.add_node({.node = 0, .num_nodes = 2, .local_ranks = 2, .address = "10.0.0.1"});
  EXPECT_THAT(orders_of<Start>(), IsEmpty());
  coordinator.add_node({.node = 1, .num_nodes = 2, .local_ranks = 2, .address = "10.0.0.2"});
  ASSERT_THAT(orders_of<Start>(), SizeIs(2));
  EXPECT_EQ(orders_of<Start>()[1].first_rank, 2);
  EXPECT_EQ(orders_of<Start>()[1].world_size, 4);
  coordinator.node_lost(1, false, "nothing was heard from it");
  EXPECT_THAT(verdict(),
              AllOf(HasSubstr("10.0.0.2"), HasSubstr("ranks 2, 3"), HasSubstr("nothing was heard")));
}

TEST_F(CoordinatorTest, hosts_that_contradict_one_another_are_refused) {
  Coordinator coordinator = make({.num_nodes = 2, .launches = true});
  coordinator.add_node({.node = 0, .num_nodes = 2, .local_ranks = 2});
  EXPECT_THROW(coordinator.add_node({.node = 0, .num_nodes = 2, .local_ranks = 2}), ConfigError);
  EXPECT_THROW(coordinator.add_node({.node = 2, .num_nodes = 2, .local_ranks = 2}), ConfigError);
  EXPECT_THROW(coordinator.add_node({.node = 1, .num_nodes = 3, .local_ranks = 2}), ConfigError);
  EXPECT_THAT(orders_of<Start>(), IsEmpty());
}

TEST_F(CoordinatorTest, what_makes_no_sense_is_refused) {
  Coordinator coordinator = running(2);
  EXPECT_THROW(coordinator.receive(0, {.kind = Kind::leave, .rank = -1}), FrameError);
  EXPECT_THROW(coordinator.receive(0, {.kind = Kind::store, .rank = 0, .payload = "?"}), FrameError);
  EXPECT_THROW(coordinator.receive(0, {.kind = Kind::welcome, .rank = 0}), FrameError);
  EXPECT_EQ(verdict(), "");
}

// ---- the flight record ------------------------------------------------------------------------------------

Frame flight(int rank, std::int64_t begun) {
  RankFlight flight{.pid = 100 + rank, .log = {.begun = begun}};
  flight.log.entries.push_back({.key = 1, .operation = "all_reduce", .sequence = begun - 1});
  return {.kind = Kind::flight, .rank = rank, .payload = flight.encode()};
}

TEST_F(CoordinatorTest, the_flight_record_of_a_failure_is_told_before_the_end) {
  Coordinator coordinator = running(2, 1);
  ends(coordinator, 1, {.pid = 101, .signal = SIGKILL});
  for (int rank : {0, 1}) coordinator.receive(0, flight(rank, 40 + rank));
  coordinator.receive(0, flight(7, 3));  // Of no rank of the job.
  auto broken = flight(0, 50);
  broken.payload.pop_back();
  EXPECT_THROW(coordinator.receive(0, broken), FrameError);
  EXPECT_THAT(flights, IsEmpty());
  coordinator.receive(0, {.kind = Kind::node_done});
  ASSERT_THAT(flights, SizeIs(1));
  EXPECT_EQ(flights[0].failure->rank, 1);
  EXPECT_EQ(flights[0].attempt, 0);
  EXPECT_EQ(flights[0].world_size, 2);
  EXPECT_EQ(flights[0].groups.at(1).name, "world");
  ASSERT_THAT(flights[0].ranks, SizeIs(2));
  EXPECT_EQ(flights[0].ranks.at(1).log.begun, 41);
  EXPECT_EQ(flights[0].ranks.at(0).log.entries.at(0).sequence, 39);

  // The next attempt succeeds, whatever an agent sends.
  coordinator.tick(Clock::now() + seconds(10));
  all_come(coordinator, 2, 1);
  coordinator.receive(0, flight(0, 3));
  for (int rank : {0, 1}) ends(coordinator, rank, {.pid = 100 + rank, .status = 0});
  coordinator.receive(0, {.kind = Kind::node_done});
  EXPECT_THAT(flights, SizeIs(1));
  EXPECT_THAT(orders_of<Finish>(), SizeIs(1));
}

// ---- how fast ranks are ---------------------------------------------------------------------------------

// Rank 1 of two takes five times as long from step 20 on.
void make_steps(Coordinator& coordinator, bool messages) {
  for (std::int64_t step = 0; step < 23; ++step) {
    for (int rank : {0, 1}) {
      Rows rows{.step = step + 1, .rows = {}};
      const std::int64_t busy = rank == 1 && step >= 20 ? 100'000 : 20'000;
      rows.times.push_back({.step = step, .steps = 1, .took_us = 110'000, .waited_us = 110'000 - busy});
      if (rank == 0) rows.metrics.push_back({"loss", 0.5, step});
      if (messages) rows.rows.push_back({.key = 1, .group = "world", .message = true, .peer = 0});
      coordinator.receive(0, {.kind = Kind::rows, .rank = rank, .payload = rows.encode()});
    }
    coordinator.tick(Clock::now());
  }
}

TEST_F(CoordinatorTest, a_rank_whose_steps_are_far_longer_is_named_and_all_is_in_the_status) {
  Coordinator coordinator = running(2);
  make_steps(coordinator, false);
  EXPECT_THAT(said,
              ::testing::ElementsAre("rank 1 is slow: its steps take 5.0 times as long as the other ranks' "
                                     "(busy 100 ms, others 20 ms, steps 20 to 22)"));
  ASSERT_FALSE(statuses.empty());
  EXPECT_EQ(statuses.back().step, 23);
  EXPECT_EQ(statuses.back().slowest, 1);
  EXPECT_NEAR(statuses.back().steps_per_second, 1 / 0.11, 0.01);
  ASSERT_THAT(statuses.back().metrics, SizeIs(1));
  EXPECT_EQ(statuses.back().metrics[0].name, "loss");
}

TEST_F(CoordinatorTest, ranks_that_send_messages_are_compared_with_themselves) {
  Coordinator coordinator = running(2);
  make_steps(coordinator, true);
  EXPECT_THAT(said, ::testing::ElementsAre(HasSubstr("5.0 times as long as before")));
}

}  // namespace
}  // namespace lockstep::control

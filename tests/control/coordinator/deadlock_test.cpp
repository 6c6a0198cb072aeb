// Ranks that wait for each other in several groups.
#include <lockstep/control/coordinator/coordinator.h>

#include "support/errors.h"

namespace lockstep::control {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

// Group 1 is "world", group 2 is "other"; all ranks are in both.
class HeadDeadlock : public ::testing::Test {
 protected:
  explicit HeadDeadlock(int ranks = 3)
      : coordinator_({.num_nodes = 1, .launches = true},
                     {.send =
                          [this](int, Frame frame) {
                            if (frame.kind != Kind::verdict) return;
                            const auto failure = decode_failure(frame.payload);
                            verdict_ = failure.text(), kind_ = failure.kind;
                          },
                      .order = [](int, Order) {},
                      .say = [](const std::string&) {}}) {
    coordinator_.add_node(
        {.node = 0, .num_nodes = 1, .local_ranks = ranks, .version = "1", .address = "127.0.0.1"});
    GroupMade groups[] = {{.key = 1, .name = "world", .ranks = {}}, {.key = 2, .name = "other", .ranks = {}}};
    for (int r = 0; r < ranks; ++r) {
      const Hello card{.rank = r, .size = ranks, .pid = 100 + r, .version = "1", .host = "here"};
      coordinator_.receive(0, {.kind = Kind::hello, .rank = r, .payload = card.encode()});
      for (auto& group : groups) group.ranks.push_back(r);
    }
    for (auto& group : groups)
      coordinator_.receive(0, {.kind = Kind::group, .rank = 0, .payload = group.encode()});
  }

  // A line of a rank's page: the last operation that it has begun in a group, and whether it waits for it.
  static Row line(std::int64_t key, std::int64_t sequence, bool waits) {
    return {.key = key,
            .group = key == 1 ? "world" : "other",
            .sequence = sequence,
            .operation = key == 1 ? "all_reduce" : "all_gather",
            .site = key == 1 ? "train.cpp:42" : "net.cpp:7",
            .running = waits,
            .waited_ms = waits ? 100 : -1,
            .waits_for = waits ? sequence : -1};
  }
  struct Place {
    std::vector<Row> rows;
    int threads = 1, blocked = 1;
  };
  // Rank 0 waits in "other", and ranks 1 and 2 in "world", where rank 0 has made one call less.
  static std::vector<Place> cycle() {
    return {{{line(1, 4, false), line(2, 7, true)}},
            {{line(1, 5, true), line(2, 6, false)}},
            {{line(1, 5, true), line(2, 6, false)}}};
  }
  // The coordinator's verdict after 1.5 s of ranks in that state.
  std::string verdict_of(const std::vector<Place>& places) {
    for (int i = 0; i < 15 && verdict_.empty(); ++i) {
      look(places);
      coordinator_.tick(now_ += milliseconds(100));
    }
    return verdict_;
  }
  void look(const std::vector<Place>& places) {
    for (std::size_t r = 0; r < places.size(); ++r) {
      const Rows rows{.threads = places[r].threads, .blocked = places[r].blocked, .rows = places[r].rows};
      coordinator_.receive(0, {.kind = Kind::rows, .rank = static_cast<int>(r), .payload = rows.encode()});
    }
  }

  std::string verdict_;
  CommError::Kind kind_{};
  Coordinator coordinator_;
  Clock::time_point now_ = Clock::now();
};

TEST_F(HeadDeadlock, is_ended_after_a_second_and_shows_both_sides) {
  const auto places = cycle();
  for (int ms = 0; ms <= 1000; ms += 100) {
    EXPECT_EQ(verdict_, "") << ms;
    look(places);
    coordinator_.tick(now_ + milliseconds(ms));
  }
  EXPECT_EQ(verdict_,
            "deadlock: rank 0 (pid 100) waits for rank 1 in all_gather #7 of group 'other' at net.cpp:7; "
            "rank 1 (pid 101) waits for rank 0 in all_reduce #5 of group 'world' at train.cpp:42; 1 more "
            "blocked by these. Every rank must call the operations of its groups in the same order");
  EXPECT_EQ(kind_, CommError::Kind::mismatch);
}

TEST_F(HeadDeadlock, of_three_ranks_shows_all_of_them) {
  // Each pair of ranks has its own group, and each rank waits for the next one.
  for (int r = 0; r < 3; ++r) {
    const GroupMade pair{.key = 10 + r, .name = "pair", .ranks = {r, (r + 1) % 3}};
    coordinator_.receive(0, {.kind = Kind::group, .rank = r, .payload = pair.encode()});
  }
  std::vector<Place> places;
  for (int r = 0; r < 3; ++r) {
    places.push_back({{line(10 + r, 1, true), line(10 + (r + 2) % 3, 0, false)}});
  }
  EXPECT_THAT(verdict_of(places), AllOf(HasSubstr("rank 0 (pid 100) waits for rank 1"),
                                        HasSubstr("rank 1 (pid 101) waits for rank 2"),
                                        HasSubstr("rank 2 (pid 102) waits for rank 0")));
}

TEST_F(HeadDeadlock, is_none_where_a_rank_is_not_blocked) {
  auto places = cycle();
  places[0].blocked = 0;
  places[0].rows[1] = line(2, 7, false);
  EXPECT_EQ(verdict_of(places), "");
}

TEST_F(HeadDeadlock, is_none_where_another_thread_of_a_rank_runs) {
  auto places = cycle();
  places[0].threads = 2;
  EXPECT_EQ(verdict_of(places), "");
}

TEST_F(HeadDeadlock, is_none_where_another_thread_waits_for_something_that_can_end) {
  auto places = cycle();
  // A group of ranks 0 and 1 that both have reached.
  coordinator_.receive(0, {.kind = Kind::group,
                           .rank = 0,
                           .payload = GroupMade{.key = 3, .name = "third", .ranks = {0, 1}}.encode()});
  places[0].rows.push_back(line(3, 9, true));
  places[0].threads = places[0].blocked = 2;
  places[1].rows.push_back(line(3, 9, false));
  EXPECT_EQ(verdict_of(places), "");
}

TEST_F(HeadDeadlock, is_none_where_a_wait_is_not_on_the_page) {
  auto places = cycle();
  places[0].threads = places[0].blocked = 2;  // Two threads wait in one group, whose line shows one of them.
  EXPECT_EQ(verdict_of(places), "");
}

TEST_F(HeadDeadlock, is_none_where_the_operation_was_issued_without_waiting) {
  auto places = cycle();
  places[0].rows[0] = line(1, 5, false);  // An asynchronous or dropped one.
  places[0].rows[0].running = true;
  EXPECT_EQ(verdict_of(places), "");
}

TEST_F(HeadDeadlock, is_none_where_a_message_is_waited_for) {
  auto places = cycle();
  places[0].rows[1].message = true;
  places[0].rows[1].peer = 1;
  EXPECT_EQ(verdict_of(places), "");
}

TEST_F(HeadDeadlock, is_none_where_a_page_has_no_room_for_the_group) {
  auto places = cycle();
  auto& rows = places[0].rows;
  rows.erase(rows.begin());  // The state of rank 0 in "world" is unknown.
  for (std::int64_t key = 100; rows.size() < 28; ++key) rows.push_back(line(key, 1, false));
  EXPECT_EQ(verdict_of(places), "");
}

TEST_F(HeadDeadlock, is_none_while_something_changes) {
  auto places = cycle();
  for (int i = 0; i < 40; ++i) {
    if (i % 5 == 0) {  // Rank 0 continues with the next one in "other", as do its peers.
      for (auto& place : places) ++place.rows[1].sequence;
      ++places[0].rows[1].waits_for;
    }
    look(places);
    coordinator_.tick(now_ += milliseconds(100));
    ASSERT_EQ(verdict_, "") << i;
  }
}

TEST_F(HeadDeadlock, is_none_where_a_host_is_not_heard) {
  const auto places = cycle();
  look(places);
  for (int i = 0; i < 30; ++i) {
    coordinator_.tick(now_ += milliseconds(100));
    look({places[0]});
  }
  EXPECT_EQ(verdict_, "");
}

// Every rank waits in "world", one of them in a different operation.
class HeadDiffering : public HeadDeadlock {
 protected:
  static std::vector<Place> places() {
    std::vector<Place> places(3, {{line(1, 5, true)}});
    places[1].rows[0].operation = "broadcast";
    places[1].rows[0].site = "net.cpp:9";
    return places;
  }
};

TEST_F(HeadDiffering, is_ended_after_a_second_and_shows_both_calls) {
  EXPECT_EQ(
      verdict_of(places()),
      "the ranks' calls differ in operation: rank 0 (pid 100) waits in all_reduce #5 of group 'world' at "
      "train.cpp:42, rank 1 (pid 101) in broadcast #5 of group 'world' at net.cpp:9. Every rank must call "
      "the operations of a group in the same order");
}

TEST_F(HeadDiffering, is_none_where_a_rank_has_not_come) {
  for (const bool waits_elsewhere : {false, true}) {
    auto places = this->places();
    places[2].rows[0] = line(1, 4, false);
    if (waits_elsewhere) places[2].rows.push_back(line(2, 0, true));
    places[2].threads = 2;
    EXPECT_EQ(verdict_of(places), "");
  }
}

TEST_F(HeadDiffering, is_none_where_a_rank_has_begun_more_than_it_waits_for) {
  auto places = this->places();
  places[1].rows[0].sequence = 6;  // The row describes that one.
  EXPECT_EQ(verdict_of(places), "");
}

TEST_F(HeadDiffering, is_none_where_the_operations_are_the_same) {
  EXPECT_EQ(verdict_of(std::vector<Place>(3, {{line(1, 5, true)}})), "");
}

TEST_F(HeadDeadlock, is_none_while_the_ranks_are_stopped_on_purpose) {
  coordinator_.paused(true);
  EXPECT_EQ(verdict_of(cycle()), "");
}

}  // namespace
}  // namespace lockstep::control

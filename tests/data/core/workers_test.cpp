#include <lockstep/data/core/workers.h>

#include <future>
#include <random>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

using detail::Workers;
using std::chrono::milliseconds;

TEST(Workers, results_come_in_order_whoever_is_done_first) {
  for (const int threads : {1, 2, 5}) {
    std::vector<int> slots(7), seen;
    Workers workers({.threads = threads, .slots = slots.size(), .work = [&](Workers&, int, std::size_t slot) {
                       thread_local std::mt19937 random{std::random_device{}()};
                       std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
                       slots[slot] *= 10;
                     }});
    int put = 0;
    const auto next = [&] {
      slots[put % slots.size()] = put;
      workers.put(put++ % slots.size());
    };
    while (put < 7) next();
    for (int i = 0; i < 500; ++i) {
      EXPECT_TRUE(workers.wait(i % slots.size()));
      seen.push_back(slots[i % slots.size()]);
      next();
    }
    for (int i = 0; i < 500; ++i) EXPECT_EQ(seen[i], 10 * i);
  }
}

TEST(Workers, what_a_task_throws_is_thrown_where_it_is_waited_for) {
  Workers workers({.threads = 2, .slots = 3, .work = [](Workers&, int, std::size_t slot) {
                     if (slot == 1) throw std::out_of_range("slot 1");
                   }});
  for (int round = 0; round < 50; ++round) {
    for (std::size_t slot = 0; slot < 3; ++slot) workers.put(slot);
    EXPECT_TRUE(workers.wait(0));
    EXPECT_THROW(workers.wait(1), std::out_of_range);
    EXPECT_TRUE(workers.wait(2));
  }
}

TEST(Workers, what_a_worker_throws_at_its_beginning_its_tasks_throw) {
  Workers workers({.threads = 1,
                   .slots = 1,
                   .work = [](Workers&, int, std::size_t) {},
                   .begin = [](int worker) { throw std::domain_error("worker " + std::to_string(worker)); }});
  for (int round = 0; round < 3; ++round) {
    workers.put(0);
    EXPECT_THROW(workers.wait(0), std::domain_error);
  }
}

TEST(Workers, a_wait_ends_at_its_deadline_and_says_who_is_at_what) {
  std::promise<void> go_on;
  auto gate = go_on.get_future().share();
  std::promise<void> begun;
  Workers workers({.threads = 1, .slots = 1, .work = [&](Workers& self, int worker, std::size_t) {
                     self.at(worker, 17);
                     begun.set_value();
                     gate.wait();
                   }});
  EXPECT_EQ(workers.whereabouts(), "worker 0 is idle");
  workers.put(0);
  begun.get_future().wait();
  EXPECT_FALSE(workers.wait(0, milliseconds(20)));
  EXPECT_EQ(workers.whereabouts(), "worker 0 is at index 17");
  go_on.set_value();
  EXPECT_TRUE(workers.wait(0, milliseconds(60000)));
}

TEST(Workers, the_end_forgets_what_has_not_begun_and_waits_for_what_has) {
  std::atomic<int> begun = 0, ended = 0;
  {
    Workers workers({.threads = 2, .slots = 64, .work = [&](Workers& self, int, std::size_t) {
                       ++begun;
                       while (!self.stopping()) std::this_thread::yield();
                       ++ended;
                     }});
    for (std::size_t slot = 0; slot < 64; ++slot) workers.put(slot);
    while (begun < 2) std::this_thread::yield();
  }
  EXPECT_EQ(begun, 2);
  EXPECT_EQ(ended, 2);
}

TEST(Workers, many_are_made_and_ended_at_any_moment) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<int> done(8);
    Workers workers(
        {.threads = 3, .slots = 8, .work = [&](Workers&, int, std::size_t slot) { done[slot] = 1; }});
    const auto put = random() % 9, waited = put == 0 ? 0 : random() % (put + 1);
    for (std::size_t slot = 0; slot < put; ++slot) workers.put(slot);
    for (std::size_t slot = 0; slot < waited; ++slot) {
      workers.wait(slot);
      EXPECT_EQ(done[slot], 1);
    }
  }
}

}  // namespace
}  // namespace lockstep::testing

// What happens to operations when their World is left, to a process that is forked from a rank, and the kinds
// of CommError. Each test makes its own Worlds, so these run apart from the other suites. Two ranks.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <latch>
#include <thread>

#include "support/ranks.h"
#include "support/values.h"

namespace lockstep::testing {
namespace {

using std::chrono::milliseconds;

class Leaving : public ::testing::Test {
 protected:
  void SetUp() override {
    if (num_ranks() != 2) GTEST_SKIP() << "needs 2 ranks, got " << num_ranks();
  }
};
using Kinds = Leaving;
class Fork : public Leaving {
 protected:
  void SetUp() override {
    Leaving::SetUp();
    if (test_device().is_cuda() || by_nccls_rules()) GTEST_SKIP() << "CUDA does not work in a forked process";
  }
};

// Runs the body in a World of its own.
void in_a_world(const std::function<void(World&)>& body) {
  const WorldOptions options{.timeout = std::chrono::minutes(3)};
  if (ranks_are_threads()) return run_threads(2, body, options);
  auto world = fresh_world(options);
  body(world);
}

// What a rank holds while its World is destroyed.
struct Held {
  std::vector<at::Tensor> tensors;
  std::vector<Work> works;
};

TEST_F(Leaving, held_operations_are_finished_first) {
  std::array<Held, 2> held;
  std::atomic<int> here = -1;
  in_a_world([&](World& world) {
    auto group = world.group();
    auto& mine = held[static_cast<std::size_t>(world.rank())];
    here = world.rank();
    for (int i = 0; i < 30; ++i) {
      auto tensor = value(world.rank(), {i % 3 == 0 ? 200'000 : 5}, at::kFloat, i);
      mine.works.push_back(group.all_reduce(tensor));
      mine.tensors.push_back(tensor);
    }
    // Leaves work for after the engine: an average that goes to every other column.
    auto striped = at::full({4, 6}, 2.0 + 2 * world.rank(), on());
    mine.works.push_back(group.all_reduce(striped.slice(1, 0, 6, 2), {.op = ReduceOp::AVG}));
    mine.tensors.push_back(striped);
    auto message = at::full({3}, 7.0 + world.rank(), on());
    mine.works.push_back(world.rank() == 0 ? group.send(message, {.peer = 1})
                                           : group.recv(message, {.peer = 0}));
    mine.tensors.push_back(message);
  });
  for (int rank = 0; rank < 2; ++rank) {
    if (!ranks_are_threads() && rank != here) continue;
    auto& [tensors, works] = held[static_cast<std::size_t>(rank)];
    for (int i = 0; i < 30; ++i) {
      const std::int64_t size = i % 3 == 0 ? 200'000 : 5;
      EXPECT_SAME(tensors[static_cast<std::size_t>(i)],
                  reduced_values(2, {size}, at::kFloat, ReduceOp::SUM, i));
    }
    EXPECT_SAME(tensors[30].slice(1, 0, 6, 2), at::full({4, 3}, 3.0, on()));
    EXPECT_SAME(tensors[30].slice(1, 1, 6, 2), at::full({4, 3}, 2.0 + 2 * rank, on()));
    EXPECT_SAME(tensors[31], at::full({3}, 7.0, on()));
    for (auto& work : works) {
      EXPECT_TRUE(work.done());
      work.wait();
    }
  }
}

TEST_F(Leaving, a_thread_that_waits_meanwhile_has_the_result) {
  for (int round = 0; round < 5; ++round) {
    std::array<std::thread, 2> threads;
    in_a_world([&](World& world) {
      auto tensor = at::ones({1000}, on());
      auto work = std::make_shared<Work>(world.group().all_reduce(tensor));
      threads[static_cast<std::size_t>(world.rank())] = std::thread([tensor, work] {
        work->wait();
        EXPECT_SAME(tensor, at::full({1000}, 2.0, on()));
      });
    });
    for (auto& thread : threads)
      if (thread.joinable()) thread.join();
  }
}

// Rank 0 waits for a message that rank 1 would send after a barrier that rank 0 never joins.
TEST_F(Leaving, does_not_wait_for_who_waits_for_this_rank) {
  if (!ranks_are_threads() && transport() != "shm")
    GTEST_SKIP() << "transport " << transport() << " does not know who waits for this rank";
  if (by_nccls_rules()) GTEST_SKIP() << "a message begins only when both ranks have started it";
  std::optional<Work> held;
  in_a_world([&](World& given) {
    auto group = given.group({0, 1});
    given.group().barrier().wait();
    if (given.rank() == 0) {
      held.emplace(group.recv(at::ones({1}, on()), {.peer = 1}));
      return;
    }
    EXPECT_THAT(error_of<CommError>([&] { given.group().barrier().wait(); }), HasSubstr("rank 0 has left"));
  });
  if (held) {
    EXPECT_THROW(held->wait(), CommError);
  }
}

// Each rank waits for a message that the other one never sends.
TEST_F(Leaving, says_what_it_waits_for) {
  if (transport() == "mpi") GTEST_SKIP() << "MPI ends the processes of which an operation has failed";
  if (by_nccls_rules()) GTEST_SKIP() << "a message begins only when both ranks have started it";
  std::array<std::optional<Work>, 2> held;
  ::testing::internal::CaptureStderr();
  in_a_world([&](World& world) {
    auto group = world.group({0, 1}, {.timeout = milliseconds(1500)});
    group.barrier().wait();
    held[static_cast<std::size_t>(world.rank())].emplace(
        group.recv(at::ones({3}, on()), {.peer = 1 - world.rank()}));
  });
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("the destructor of World waits for an operation in flight: recv(float32 [3]"));
  for (auto& work : held)
    if (work) {
      EXPECT_THROW(work->wait(), CommError);
    }
}

CommError::Kind kind_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const CommError& error) {
    EXPECT_EQ(error.kind(), error.details().kind);
    return error.kind();
  }
  ADD_FAILURE() << "no error";
  return {};
}

TEST_F(Kinds, deadline) {
  std::latch over(2);
  in_a_world([&](World& world) {
    auto group = world.group({0, 1});
    if (world.rank() == 0) {
      auto tensor = at::ones({2}, on());
      EXPECT_EQ(kind_of([&] { group.all_reduce(tensor, {.timeout = milliseconds(200)}).wait(); }),
                CommError::Kind::deadline);
      // Every later call fails in the same way.
      EXPECT_EQ(kind_of([&] { group.barrier().wait(); }), CommError::Kind::deadline);
    }
    ranks_are_threads() ? over.arrive_and_wait() : world.group().barrier().wait();
  });
}

TEST_F(Kinds, mismatch) {
  if (!compares_calls()) GTEST_SKIP() << "LOCKSTEP_CHECK is not set";
  in_a_world([&](World& world) {
    auto group = world.group({0, 1});
    auto tensor = at::ones({2}, on());
    const auto call = [&] {
      (world.rank() == 0 ? group.all_reduce(tensor) : group.broadcast(tensor)).wait();
    };
    EXPECT_EQ(kind_of(call), CommError::Kind::mismatch);
    EXPECT_EQ(kind_of([&] { group.barrier().wait(); }), CommError::Kind::mismatch);
    world.group().barrier().wait();
  });
}

TEST_F(Kinds, peer_died) {
  if (transport() == "mpi") GTEST_SKIP() << "MPI does not report that a rank has left a group";
  std::latch over(2);
  in_a_world([&](World& world) {
    {
      auto group = world.group({0, 1});
      group.barrier().wait();
      if (world.rank() == 0) {
        EXPECT_EQ(kind_of([&] {
                    auto tensor = at::ones({2}, on());
                    group.all_reduce(tensor).wait();
                  }),
                  CommError::Kind::peer_died);
      }
    }
    ranks_are_threads() ? over.arrive_and_wait() : world.group().barrier().wait();
  });
}

TEST_F(Kinds, stopped) {
  std::latch over(2);
  try {
    in_a_world([&](World& world) {
      auto group = world.group();
      group.barrier().wait();
      if (world.rank() == 0) {
        world.fail("the program's own reason");
        EXPECT_EQ(kind_of([&] { group.barrier().wait(); }), CommError::Kind::stopped);
      }
      if (ranks_are_threads()) over.arrive_and_wait();
    });
  } catch (const CommError& error) {  // on the rank that was left alone
    ADD_FAILURE() << error.what();
  }
}

// Returns the error of a call in a child of fork().
std::string child_says(const std::function<std::string()>& call) {
  int ends[2];
  if (::pipe(ends) != 0) return "no pipe";
  const pid_t child = ::fork();
  if (child == 0) {
    const auto text = call();
    [[maybe_unused]] const auto written = ::write(ends[1], text.data(), text.size());
    ::_exit(0);
  }
  ::close(ends[1]);
  std::string text(10'000, '\0');
  std::size_t size = 0;
  while (size < text.size()) {
    const auto n = ::read(ends[0], text.data() + size, text.size() - size);
    if (n <= 0) break;
    size += static_cast<std::size_t>(n);
  }
  ::close(ends[0]);
  text.resize(size);
  int status = 0;
  ::waitpid(child, &status, 0);
  return status == 0 ? text : text + " (status " + std::to_string(status) + ")";
}

std::string caught(const std::function<void()>& call) {
  try {
    call();
    return "no error\n";
  } catch (const CommError& error) {
    return std::string(name(error.kind())) + ": " + error.what() + "\n";
  } catch (const std::exception& error) {
    return std::string("another error: ") + error.what() + "\n";
  }
}

TEST_F(Fork, a_child_is_refused_and_the_job_goes_on) {
  std::latch forked(2);
  in_a_world([&](World& world) {
    auto group = world.group();
    auto tensor = at::ones({100}, on()), message = at::zeros({3}, on());
    group.all_reduce(tensor).wait();
    if (world.rank() == 0) {
      // In flight, and unable to complete before the child has ended.
      auto pending = group.recv(message, {.peer = 1});
      const auto said = child_says([&] {
        std::string text;
        text += caught([&] { group.all_reduce(tensor).wait(); });
        text += caught([&] { group.barrier().wait(); });
        text += caught([&] { group.send(tensor, {.peer = 1}).wait(); });
        text += caught([&] { pending.wait(); });
        text += caught([&] { pending.wait(milliseconds(10)); });
        text += caught([&] { (void)pending.done(); });
        text += caught([&] { group.coalesce([] {}); });
        text += caught([&] { (void)world.group({0, 1}); });
        world.fail("a child's word", 1);
        world.step(7);
        { auto dropped = std::move(pending); }
        auto mine = std::move(world);
        return text;
      });
      EXPECT_THAT(said, ContainsRegex("all_reduce .*this process was forked from rank 0"));
      std::size_t refusals = 0;
      for (auto at = said.find("engine: "); at != std::string::npos; at = said.find("engine: ", at + 1))
        ++refusals;
      EXPECT_EQ(refusals, 8u) << said;
      EXPECT_THAT(said, Not(HasSubstr("status")));
      if (ranks_are_threads())
        forked.count_down();
      else
        world.group({0, 1}).barrier().wait();
      pending.wait();
      EXPECT_SAME(message, at::full({3}, 5.0, on()));
    } else {
      if (ranks_are_threads())
        forked.arrive_and_wait();
      else
        world.group({0, 1}).barrier().wait();
      group.send(at::full({3}, 5.0, on()), {.peer = 0}).wait();
    }
    if (ranks_are_threads() && world.rank() == 0) forked.wait();
    for (int i = 0; i < 10; ++i) {
      auto again = at::ones({10}, on());
      group.all_reduce(again).wait();
      EXPECT_SAME(again, at::full({10}, 2.0, on()));
    }
  });
}

}  // namespace
}  // namespace lockstep::testing

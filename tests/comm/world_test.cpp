// World, Group and Work apart from the collectives themselves; ranks are threads.
#include <dlfcn.h>

#include <lockstep/comm/world.h>

#include <sys/wait.h>
#include <unistd.h>

#include <future>
#include <latch>
#include <thread>

#include <lockstep/comm/c10d/transport.h>

#include "support/environment.h"
#include "support/ranks.h"
#include "support/values.h"

namespace lockstep::testing {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// LibTorch contains a std::filesystem of its own, from another compiler. Ours is the shared one, or, if the
// compiler has only a static library, the one that we link.
TEST(Program, the_standard_library_is_the_compilers_own) {
  void* const function = ::dlsym(RTLD_DEFAULT, "_ZNSt10filesystem10remove_allERKNS_7__cxx114pathE");
  Dl_info info{};
  ASSERT_NE(::dladdr(function, &info), 0);
  EXPECT_THAT(info.dli_fname,
              ::testing::AnyOf(::testing::HasSubstr("libstdc++"), ::testing::HasSubstr("liblockstep"),
                               ::testing::EndsWith("comm_tests")));
}

TEST(World, alone_it_is_a_world_of_one) {
  auto world = World::from_environment();
  EXPECT_EQ(world.rank(), 0);
  EXPECT_EQ(world.size(), 1);
  EXPECT_EQ(world.local_rank(), 0);
  EXPECT_EQ(world.local_size(), 1);
  EXPECT_TRUE(world.is_main());
  auto tensor = at::ones({3});
  world.group().all_reduce(tensor, {.op = ReduceOp::AVG}).wait();
  EXPECT_SAME(tensor, at::ones({3}));
}

TEST(World, one_at_a_time_in_a_process) {
  auto first = std::make_unique<World>(World::from_environment());
  EXPECT_THAT(error_of<ConfigError>([] { World::from_environment(); }), HasSubstr("one at a time"));
  first.reset();
  auto second = World::from_environment();
  EXPECT_EQ(second.size(), 1);
}

TEST(World, a_failed_start_leaves_room_for_another) {
  EXPECT_THROW(World::from_environment({.backend = "nonsense"}), ConfigError);
  EXPECT_EQ(World::from_environment().size(), 1);
}

TEST(World, init_process_group_is_the_same_thing) {
  auto world = init_process_group("gloo", 0, 1);
  EXPECT_EQ(world.group().backend(), "gloo");
  EXPECT_THROW(init_process_group("gloo", 3, 2), ConfigError);
}

TEST(World, backends_are_named_or_listed_by_device) {
  EXPECT_EQ(World::from_environment({.backend = "cpu:gloo"}).group().backend(), "gloo");
  EXPECT_EQ(World::from_environment({.backend = "shm"}).group().backend(), "shm");
  for (const char* bad : {"gluu", "cpu:", "cpu:gloo,cpu:mpi", "tpu:gloo", "cpu:nccl", "cpu:cuda_ipc",
                          "cuda:gloo", "cpu:gloo,", ":"})
    EXPECT_THAT(error_of<ConfigError>([&] { World::from_environment({.backend = bad}); }), HasSubstr(bad));
  EXPECT_THROW(run_threads(1, [](World&) {}, {.backend = "gloo"}), ConfigError);
  ScopedEnvironment scope("LOCKSTEP_BACKEND", "gloo");
  EXPECT_EQ(World::from_environment().group().backend(), "gloo");
  run_threads(1,
              // the variable is for processes
              [](World& world) { EXPECT_EQ(world.group().backend(), "threads"); });
}

TEST(World, a_gpu_that_is_not_there_is_named) {
  if (detail::cuda_ipc_available()) GTEST_SKIP() << "this build has cuda_ipc";
  for (const char* backend : {"cuda_ipc", "cpu:gloo,cuda:cuda_ipc"})
    EXPECT_THAT(error_of<ConfigError>([&] { World::from_environment({.backend = backend}); }),
                HasSubstr("backend 'cuda_ipc'"));
}

TEST(World, bad_limits_are_refused) {
  EXPECT_THROW(World::from_environment({.timeout = milliseconds(0)}), ConfigError);
  ScopedEnvironment scope("LOCKSTEP_TIMEOUT", "soon");
  EXPECT_THAT(error_of<ConfigError>([] { World::from_environment(); }),
              HasSubstr("LOCKSTEP_TIMEOUT: expected"));
}

TEST(World, a_child_that_is_forked_cannot_use_its_groups_in_shared_memory) {
  auto world = World::from_environment({.backend = "shm"});
  auto group = world.group();
  auto tensor = at::ones({3});
  group.all_reduce(tensor).wait();
  const pid_t child = ::fork();
  if (child == 0) {
    std::string text;
    try {
      group.all_reduce(tensor).wait();
    } catch (const CommError& error) {
      text = error.what();
    }
    ::_exit(text.find("this process was forked from") != std::string::npos ? 7 : 8);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 7);
  group.all_reduce(tensor).wait();
}

TEST(World, a_group_outlives_it_as_an_error) {
  std::optional<Group> group;
  {
    auto world = World::from_environment();
    group = world.group();
  }
  EXPECT_THAT(error_of<ConfigError>([&] { group->barrier().wait(); }), HasSubstr("World was destroyed"));
  EXPECT_THROW((void)group->split(0), ConfigError);
}

TEST(World, leaving_by_an_exception_is_quick_and_throws_nothing_else) {
  const auto start = Clock::now();
  EXPECT_THAT(error_of<std::logic_error>([] {
                run_threads(2, [](World& world) {
                  if (world.rank() == 0) throw std::logic_error("a bug of the user's");
                  world.group().all_reduce(at::ones({2})).wait();
                });
              }),
              HasSubstr("a bug of the user's"));
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(60)) << "the timeout is 30 minutes";
}

TEST(RunThreads, the_others_are_told_who_threw) {
  std::string text;
  EXPECT_THROW(run_threads(3,
                           [&](World& world) {
                             world.group().barrier().wait();
                             if (world.rank() == 2) throw std::logic_error("broken");
                             const auto error = error_of<CommError>([&] { world.group().barrier().wait(); });
                             if (world.rank() == 0) text = error;
                           }),
               std::logic_error);
  EXPECT_THAT(text,
              AllOf(HasSubstr("rank 2 threw: broken"), HasSubstr("peer: rank 2"), HasSubstr("barrier")));
}

TEST(RunThreads, a_rank_that_returns_while_others_wait_is_named) {
  run_threads(2, [](World& world) {
    if (world.rank() == 1) return;
    EXPECT_THAT(error_of<CommError>([&] { world.group().barrier().wait(); }), HasSubstr("rank 1 has left"));
  });
}

TEST(RunThreads, sums_have_the_same_bits_for_any_number_of_ranks) {
  // Eight leaves of the tree, on 1, 2, 4 and 8 ranks.
  at::manual_seed(1);
  const auto leaves = at::randn({8, 1000});
  auto halves = [](const at::Tensor& rows) {
    auto sum = rows;
    while (sum.size(0) > 1) sum = sum.slice(0, 0, sum.size(0), 2) + sum.slice(0, 1, sum.size(0), 2);
    return sum[0];
  };
  const auto expected = halves(leaves);
  for (int ranks : {1, 2, 4, 8})
    run_threads(ranks, [&](World& world) {
      const auto share = 8 / ranks;
      auto sum = halves(leaves.narrow(0, world.rank() * share, share)).clone();
      world.group().all_reduce(sum).wait();
      EXPECT_SAME(sum, expected);
    });
}

TEST(Work, a_deadline_ends_the_wait_and_names_the_absent) {
  // Rank 2 stays until its peers have given up, and they begin together: both deadlines are at least 200 ms
  // after both have read the clock.
  std::latch ready(2), over(3);
  run_threads(3, [&](World& world) {
    if (world.rank() == 2) return over.arrive_and_wait();
    auto group = world.group();
    const auto start = Clock::now();
    ready.arrive_and_wait();
    try {
      group.all_reduce(at::ones({4, 2}), {.tag = "grads", .timeout = milliseconds(200)}).wait();
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      const auto& d = error.details();
      EXPECT_GE(Clock::now() - start, milliseconds(190));
      EXPECT_EQ(d.operation, "all_reduce");
      EXPECT_EQ(d.group, "world");
      EXPECT_EQ(d.rank, world.rank());
      EXPECT_EQ(d.size, 3);
      EXPECT_EQ(d.sequence, 0u);
      EXPECT_EQ(d.tensor, "float32 [4, 2]");
      EXPECT_EQ(d.tag, "grads");
      EXPECT_THAT(d.call_site, HasSubstr("world_test.cpp:"));
      // The rank whose deadline passed first reports which rank is absent; the other one gets that report.
      EXPECT_THAT(d.cause, AllOf(HasSubstr("deadline"), HasSubstr("rank 2 has not arrived")));
    }
    over.arrive_and_wait();
  });
}

TEST(Work, deadlines_come_from_call_group_and_world) {
  // Rank 1 stays until rank 0 has given up, so only the deadline can end the wait, however busy the machine.
  auto cause = [](const std::function<Work(World&)>& start, WorldOptions options) {
    std::promise<void> over;
    auto until_over = over.get_future().share();
    std::string text;
    auto body = [&](World& world) {
      if (world.rank() == 1) {
        std::optional<Group> kept;
        if (options.join_timeout) kept = world.group({0, 1}, {.timeout = milliseconds(150)});
        return until_over.wait();
      }
      text = error_of<CommError>([&] { start(world).wait(); });
      over.set_value();
    };
    run_threads(2, body, options);
    return text;
  };
  const auto t = at::ones({2});
  const auto says_so = HasSubstr("it did not complete within 0.150 s (its deadline)");
  EXPECT_THAT(
      cause([&](World& world) { return world.group().all_reduce(t); }, {.timeout = milliseconds(150)}),
      says_so);
  EXPECT_THAT(
      cause([&](World& world) { return world.group().all_reduce(t, {.timeout = milliseconds(150)}); }, {}),
      says_so);
  auto on_group = [&](World& world) {
    return world.group({0, 1}, {.timeout = milliseconds(150)}).all_reduce(t);
  };
  EXPECT_THAT(cause(on_group, {.join_timeout = std::chrono::seconds(60)}), says_so);
}

TEST(Work, wait_with_a_limit_of_its_own) {
  std::latch over(2);
  run_threads(2, [&](World& world) {
    if (world.rank() == 1) return over.arrive_and_wait();
    auto work = world.group().all_reduce(at::ones({2}));
    EXPECT_FALSE(work.done());
    EXPECT_THROW(work.wait(milliseconds(50)), CommError);
    EXPECT_TRUE(work.done());
    EXPECT_THROW(work.wait(), CommError);  // throws the same again
    over.arrive_and_wait();
  });
}

TEST(Work, two_threads_may_wait_for_one) {
  run_threads(2, [](World& world) {
    auto tensor = at::ones({2});
    if (world.rank() == 1) std::this_thread::sleep_for(milliseconds(50));
    auto work = world.group().all_reduce(tensor);
    std::thread other([&] { work.wait(); });
    work.wait();
    other.join();
    EXPECT_SAME(tensor, at::full({2}, 2.0));
  });
}

TEST(Work, a_dropped_ones_error_surfaces_at_the_next_call) {
  run_threads(2, [](World& world) {
    auto group = world.group();
    { auto dropped = group.all_reduce(at::ones({2 + world.rank()})); }
    // Rank 0 does not know of the failure yet when it drops the Work: the next call reports it.
    std::this_thread::sleep_for(milliseconds(100));
    EXPECT_THAT(error_of<CommError>([&] { group.barrier().wait(); }),
                AllOf(HasSubstr("differ in size"), HasSubstr("barrier")));
  });
}

TEST(Work, dropping_does_not_block) {
  std::promise<void> dropped;
  auto until_dropped = dropped.get_future().share();
  run_threads(2, [&](World& world) {
    auto group = world.group();
    // Rank 1 arrives after rank 0 has dropped its operation.
    if (world.rank() == 1) {
      EXPECT_EQ(until_dropped.wait_for(std::chrono::seconds(60)), std::future_status::ready);
    }
    { auto gone = group.all_reduce(at::ones({10})); }
    if (world.rank() == 0) dropped.set_value();
    group.barrier().wait();
  });
}

TEST(World, fail_ends_every_wait_in_every_group_and_thread) {
  std::latch over(2);  // rank 1 stays, so nothing else ends the waits
  run_threads(2, [&](World& world) {
    auto other = world.group({0, 1});
    if (world.rank() == 1) return over.arrive_and_wait();
    auto group = world.group();
    auto first =
        std::async(std::launch::async, [&] { return error_of<CommError>([&] { group.barrier().wait(); }); });
    auto second = std::async(std::launch::async, [&] {
      return error_of<CommError>([&] { other.recv(at::ones({1}), {.peer = 1}).wait(); });
    });
    std::this_thread::sleep_for(milliseconds(100));
    const auto told = Clock::now();
    world.fail("the verdict", 1);
    EXPECT_THAT(first.get(), HasSubstr("the verdict"));
    EXPECT_THAT(second.get(), HasSubstr("the verdict"));
    EXPECT_LT(Clock::now() - told, std::chrono::seconds(60)) << "the timeout is 30 minutes";
    EXPECT_THROW((void)world.group({0}), Error);
    over.arrive_and_wait();
  });
}

TEST(Work, one_that_was_moved_from_says_so) {
  run_threads(1, [](World& world) {
    auto first = world.group().barrier();
    auto second = std::move(first);
    EXPECT_THAT(error_of<Error>([&] { first.wait(); }), HasSubstr("moved from"));
    second.wait();
  });
}

TEST(Work, one_that_outlives_its_world_does_not_keep_the_peer_waiting) {
  const auto start = Clock::now();
  std::optional<Work> kept;
  run_threads(2,
              [&](World& world) {
                if (world.rank() == 0) {
                  kept.emplace(world.group().recv(at::ones({1}), {.peer = 1}));
                  return;
                }
                EXPECT_THAT(error_of<CommError>([&] { world.group().barrier().wait(); }),
                            HasSubstr("rank 0 has left"));
              },
              {.timeout = std::chrono::seconds(120)});
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(60));
}

TEST(Group, receives_from_any_rank_end_when_all_others_have_left) {
  run_threads(3, [](World& world) {
    if (world.rank() > 0) return;
    EXPECT_THAT(error_of<CommError>([&] { world.group().recv(at::ones({1}), {.peer = kAnyRank}).wait(); }),
                HasSubstr("left the group"));
  });
  run_threads(1, [](World& world) {
    EXPECT_THROW((void)world.group().recv(at::ones({1}), {.peer = kAnyRank}), ConfigError);
    world.group().barrier().wait();
  });
}

TEST(Group, dtypes_without_a_reduction_are_compared_too) {
  run_threads(2, [](World& world) {
    auto tensor = at::zeros({4096}, world.rank() == 0 ? at::kUInt32 : at::kUInt16);
    EXPECT_THAT(error_of<CommError>([&] { world.group().broadcast(tensor).wait(); }),
                AllOf(HasSubstr("dtype"), HasSubstr("uint32"), HasSubstr("uint16")));
  });
}

TEST(Group, lazy_views_travel_as_their_values) {
  run_threads(2, [](World& world) {
    auto group = world.group();
    auto z = at::complex(at::arange(4.0, at::kFloat), at::ones({4}) * (world.rank() + 1));
    auto out = at::zeros({8}, at::kComplexFloat);
    group.all_gather(out, z.conj()).wait();
    EXPECT_SAME(at::imag(out), at::cat({at::full({4}, -1.0), at::full({4}, -2.0)}));
    auto target = at::zeros({4}, at::kComplexFloat);
    group.broadcast(world.rank() == 0 ? z : target.conj()).wait();
    if (world.rank() == 1) EXPECT_SAME(at::imag(target), at::full({4}, -1.0));
  });
}

TEST(Group, text_is_broadcast_as_text) {
  run_threads(2, [](World& world) {
    const char* mine = world.rank() == 0 ? "zero" : "one";
    EXPECT_EQ(world.group().broadcast_value(mine, {.root = 1}), "one");
    EXPECT_EQ(world.group().broadcast_value(std::string_view(mine)), "zero");
    EXPECT_EQ(world.group().all_gather_values("x"), (std::vector<std::string>{"x", "x"}));
  });
}

TEST(Group, limits_are_checked_and_do_not_overflow) {
  run_threads(2, [](World& world) {
    auto group = world.group();
    group.barrier({.timeout = milliseconds::max()}).wait(milliseconds::max());
    EXPECT_THROW((void)group.barrier({.timeout = milliseconds(0)}), ConfigError);
    EXPECT_THROW((void)world.group({0, 1}, {.timeout = milliseconds(-5)}), ConfigError);
    group.barrier().wait();
  });
}

TEST(Group, use_while_the_world_goes_is_an_error_not_a_crash) {
  for (int round = 0; round < 20; ++round) {
    auto world = std::make_unique<World>(World::from_environment());
    auto group = world->group();
    std::thread user([&] {
      try {
        for (;;) group.barrier().wait();
      } catch (const ConfigError&) {
      }
    });
    std::this_thread::sleep_for(milliseconds(1));
    world.reset();
    user.join();
  }
}

TEST(Group, two_groups_from_two_threads_do_not_disturb_each_other) {
  run_threads(2, [](World& world) {
    auto a = world.group({0, 1}), b = world.group({0, 1});
    auto use = [&](Group group, int salt) {
      for (int i = 0; i < 200; ++i) {
        auto tensor = value(group.rank(), {64}, at::kFloat, salt + i);
        group.all_reduce(tensor).wait();
        EXPECT_SAME(tensor, reduced_values(2, {64}, at::kFloat, ReduceOp::SUM, salt + i));
      }
    };
    std::thread other([&] { use(a, 0); });
    use(b, 3);
    other.join();
  });
}

TEST(Group, what_the_caller_can_fix_is_a_config_error_before_anything_moves) {
  run_threads(2, [](World& world) {
    auto group = world.group();
    auto good = at::ones({4});
    auto refuses = [&](const std::function<void()>& call, const char* part) {
      EXPECT_THAT(error_of<ConfigError>(call), HasSubstr(part));
    };
    refuses([&] { (void)group.all_reduce(at::Tensor()); }, "undefined");
    refuses([&] { (void)group.all_reduce(good.to_sparse()); }, "dense");
    refuses([&] { (void)group.all_reduce(at::ones({1}).expand({4})); }, "clone()");
    refuses([&] { (void)group.all_reduce(at::ones({4}, at::kInt), {.op = ReduceOp::AVG}); },
            "avg of a int32");
    refuses([&] { (void)group.all_reduce(good, {.op = ReduceOp::BAND}); }, "and of a float32");
    refuses([&] { (void)group.all_reduce(at::ones({4}, at::kMeta)); }, "no transport for that device");
    refuses([&] { (void)group.broadcast(good, {.root = 2}); }, "got 2");
    refuses([&] { (void)group.broadcast(good, {.root = -1}); }, "got -1");
    refuses([&] { (void)group.all_gather(at::ones({9}), good); }, "9 elements");
    refuses([&] { (void)group.all_gather(at::ones({8}, at::kInt), good); }, "int32");
    refuses([&] { (void)group.all_gather(std::vector<at::Tensor>{good}, good); }, "1 tensors");
    refuses([&] { (void)group.all_gather({at::ones({3}), at::ones({3})}, good); }, "got 3");
    refuses(
        [&] { (void)group.gather(world.rank() == 0 ? std::vector<at::Tensor>{} : std::vector{good}, good); },
        "tensors");
    refuses(
        [&] {
          (void)group.scatter(good, world.rank() == 0 ? std::vector<at::Tensor>{good} : std::vector{good});
        },
        "tensors");
    refuses([&] { (void)group.reduce_scatter(good, good); }, "elements");
    refuses([&] { (void)group.all_to_all(at::ones({3}), at::ones({4})); }, "3 rows");
    refuses([&] { (void)group.all_to_all(at::ones({4}), good, {.out_splits = {1, 2}}); }, "got [1, 2]");
    refuses([&] { (void)group.all_to_all(at::ones({4}), good, {.in_splits = {5, -1}}); }, "got [5, -1]");
    refuses([&] { (void)group.all_to_all(good, good); }, "share memory");
    refuses([&] { (void)group.all_reduce(at::ones({4}).as_strided({3, 2}, {1, 1})); }, "clone()");
    refuses([&] { (void)group.send(good, {.peer = world.rank()}); }, "peer: expected another rank");
    refuses([&] { (void)group.send(good, {.peer = kAnyRank}); }, "got -1");
    refuses([&] { (void)group.recv(good, {.peer = 7}); }, "kAnyRank");
    refuses([&] { (void)group.send(good, {.peer = 1 - world.rank(), .tag = -1}); },
            "tag: expected 0 to 1073741823, got -1");
    refuses([&] { (void)group.split(-1); }, "colour of 0 or more, got -1");
    refuses([&] { (void)group.subgroup({0, 5}); }, "rank 5");
    refuses([&] { (void)world.group({1 - world.rank()}); }, "only its members");
    refuses([&] { (void)world.group({}); }, "[]");
    refuses([&] { (void)world.group({world.rank(), world.rank()}); }, "different ranks");
    // None of these calls has affected the group.
    group.all_reduce(good).wait();
    EXPECT_SAME(good, at::full({4}, 2.0));
  });
}

struct Recorder : Observer {
  void started(const Call& call) noexcept override { add("start " + std::string(name(call.operation))); }
  void finished(const Call& call, std::chrono::nanoseconds elapsed) noexcept override {
    add("finish " + std::string(name(call.operation)) + " " + call.tag + " " + std::to_string(call.bytes) +
        (elapsed.count() > 0 ? "" : " at once"));
  }
  void failed(const Call& call, std::chrono::nanoseconds, std::string_view cause) noexcept override {
    add("fail " + std::string(name(call.operation)) + ": " + std::string(cause));
  }
  void add(std::string line) {
    std::lock_guard lock(mutex);
    lines.push_back(std::move(line));
  }
  std::mutex mutex;
  std::vector<std::string> lines;
};

TEST(Observer, sees_start_finish_and_failure) {
  run_threads(2, [](World& world) {
    auto recorder = std::make_shared<Recorder>();
    world.add_observer(recorder);
    auto group = world.group();
    group.all_reduce(at::ones({4}), {.tag = "grads"}).wait();
    EXPECT_EQ(recorder->lines, (std::vector<std::string>{"start all_reduce", "finish all_reduce grads 16"}));
    world.remove_observer(recorder);
    group.barrier().wait();
    EXPECT_EQ(recorder->lines.size(), 2u);
    world.add_observer(recorder);
    EXPECT_THROW(group.all_reduce(at::ones({4 + world.rank()})).wait(), CommError);
    EXPECT_THAT(recorder->lines.back(), HasSubstr("fail all_reduce: the ranks' calls differ in size"));
    EXPECT_THROW(world.add_observer(nullptr), ConfigError);
  });
}

}  // namespace
}  // namespace lockstep::testing

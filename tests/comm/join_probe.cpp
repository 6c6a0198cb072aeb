// Joins and prints what it sees, or why it could not join. The tests start several of these.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iostream>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <lockstep/lockstep.h>
#include "cmake/multicall.h"

namespace lockstep::testing::join_probe {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Limit for what should take only a moment: generous, for a busy machine, but far below any timeout.
constexpr double kSoon = 30;

// Rank 1 exits silently during a large broadcast from rank 0.
int end_inside(lockstep::World& world) {
  auto tensor = at::ones({256 << 20}, at::kByte);
  const auto start = Clock::now();
  try {
    auto work = world.group().broadcast(tensor);  // rank 1 may have exited already
    if (world.rank() == 1) ::_exit(0);
    work.wait();
  } catch (const lockstep::CommError& error) {
    std::cout << "told after " << seconds_since(start) << " s: " << error.what() << std::endl;
    return seconds_since(start) < kSoon ? 0 : 1;
  }
  return 1;
}

// Rank 0, which serves the store, is stopped; rank 1 gets the failure and leaves.
int leave_stopped_server(lockstep::World& world) {
  const auto pids = world.group().all_gather_values(::getpid());
  if (world.rank() == 0) {
    ::raise(SIGSTOP);
    ::_exit(0);
  }
  const auto start = Clock::now();
  {
    auto mine = std::move(world);
    mine.fail("rank 0 is stopped", 0);
  }
  std::cout << "left after " << seconds_since(start) << " s" << std::endl;
  ::kill(pids[0], SIGCONT);
  return seconds_since(start) < kSoon ? 0 : 1;
}

// Rank 0 has finished and exited before rank 2 arrives. If it hosts the agent, it stays until its peers are
// done: then rank 2 arrives long after rank 0's part.
int gather_late(lockstep::World& world) {
  const auto pids = world.group().all_gather_values(::getpid());
  std::vector<at::Tensor> all;
  for (int r = 0; world.rank() == 1 && r < 3; ++r) all.push_back(at::zeros({16}));
  for (int ms = 0; world.rank() == 2 && ms < 1500 && ::kill(pids[0], 0) == 0; ms += 5)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  world.group().gather(all, at::ones({16}), {.root = 1}).wait();
  std::cout << "gathered" << std::endl;
  return 0;
}

// Child processes of a rank: one that is asked to end, one that throws. Neither is the rank.
int have_helpers(lockstep::World& world) {
  world.stop_requested();
  for (const bool throws : {false, true}) {
    const pid_t helper = ::fork();
    if (helper == 0 && throws) std::thread([] { throw std::runtime_error("a helper's trouble"); }).join();
    if (helper == 0)
      for (;;) ::pause();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    if (!throws) ::kill(helper, SIGTERM);
    int status = 0;
    ::waitpid(helper, &status, 0);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != (throws ? SIGABRT : SIGTERM)) return 6;
  }
  const auto before = std::clock();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  if (static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC > 0.25) return 7;  // a thread is spinning
  world.group().barrier().wait();
  std::cout << "helped" << std::endl;
  return world.stop_requested() ? 8 : 0;
}

// Rank 0, whose process hosts the agent, leaves first; rank 1 continues for longer than the join timeout.
int work_alone(lockstep::World& world) {
  if (world.rank() == 0) return 0;
  const char* join_timeout = std::getenv("LOCKSTEP_JOIN_TIMEOUT");  // in whole seconds
  std::this_thread::sleep_for(std::chrono::seconds(1 + std::atoi(join_timeout)));
  world.group({1}).barrier().wait();
  std::cout << "worked alone" << std::endl;
  return 0;
}

// A thread that blocks in a read that never completes: exit() must not wait for it.
void read_forever() {
  int ends[2];
  if (::pipe(ends) != 0) return;
  std::FILE* in = ::fdopen(ends[0], "r");
  std::thread([in] { std::fgetc(in); }).detach();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
}

// Rank 0 drops an operation that its peer never joins.
int drop_one(lockstep::World& world) {
  read_forever();
  if (world.rank() == 0) {
    // Long enough for a busy machine: a call that takes longer than the deadline throws by itself.
    auto dropped = world.group().recv(at::ones({3}), {.peer = 1, .timeout = std::chrono::milliseconds(1500)});
  }
  std::cout << "dropped" << std::endl;
  return 0;
}

// Rank 0 has heard of the failure of another group when it drops an operation whose partner never comes.
int drop_after_another(lockstep::World& world) {
  auto tensor = at::ones({3});
  auto other = world.group({0, 1});
  if (world.rank() == 0) {
    try {
      other.all_reduce(tensor, {.timeout = std::chrono::milliseconds(100)}).wait();
    } catch (const lockstep::CommError& error) {
      std::cout << "heard: " << error.what() << std::endl;
    }
  }
  world.group().barrier().wait();
  if (world.rank() == 0) {
    auto dropped = world.group().all_reduce(tensor, {.timeout = std::chrono::milliseconds(300)});
  } else {
    std::this_thread::sleep_for(std::chrono::milliseconds(600));
  }
  std::cout << "dropped" << std::endl;
  return 0;
}

// Rank 0 looks at an operation whose partner never comes until it is over, and does not ask how it ended.
int look_only(lockstep::World& world) {
  if (world.rank() == 0) {
    auto looked_at =
        world.group().recv(at::ones({3}), {.peer = 1, .timeout = std::chrono::milliseconds(300)});
    while (!looked_at.done()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  std::cout << "dropped" << std::endl;
  // Before that the engine would say that this rank has left.
  if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(600));
  return 0;
}

// An exception ends rank 0 while an operation is in flight that no other rank joins.
int unwind(lockstep::World world) {
  const bool here = world.rank() == 0;
  std::optional<lockstep::Work> held;
  try {
    const auto mine = std::move(world);
    if (here) {
      held.emplace(mine.group().all_reduce(at::ones({3})));
      throw std::runtime_error("a bug of the program's");
    }
    mine.group().barrier().wait();
  } catch (const std::exception& error) {
    std::cout << "caught: " << error.what() << std::endl;
  }
  if (!held) return 0;
  const auto start = Clock::now();
  try {
    held->wait();
  } catch (const lockstep::CommError& error) {
    std::cout << name(error.kind()) << ": " << error.what() << std::endl;
    return seconds_since(start) < kSoon ? 0 : 1;
  }
  return 1;
}

// Waits until rank 0 hosts the agent of this host, whose socket has the master's address in its name.
void await_agent() {
  const auto master = std::string(std::getenv("MASTER_ADDR")) + ":" + std::getenv("MASTER_PORT");
  for (const auto start = Clock::now(); seconds_since(start) < kSoon;) {
    std::ifstream sockets("/proc/net/unix");
    for (std::string line; std::getline(sockets, line);)
      if (line.find("@lockstep/") != std::string::npos && line.find(master) != std::string::npos) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace

MULTICALL_MAIN(join_probe) {
  try {
    const char* rank = std::getenv("RANK");
    if (argc > 2 && std::string(argv[2]) == "stays" && rank && rank[0] != '0') await_agent();
    auto world = lockstep::World::from_environment({.backend = argc > 1 ? argv[1] : ""});
    std::cout << "rank " << world.rank() << " of " << world.size() << ", local " << world.local_rank()
              << " of " << world.local_size() << ", " << world.group().backend() << std::endl;
    world.group().barrier().wait();
    const std::string what = argc > 2 ? argv[2] : "";
    if (what == "again") {
      {
        auto left = std::move(world);
      }
      auto second = lockstep::World::from_environment({.backend = argv[1]});
      second.group().barrier().wait();
      std::cout << "joined again" << std::endl;
      return 0;
    }
    if (what == "drop") return drop_one(world);
    if (what == "drop another") return drop_after_another(world);
    if (what == "look only") return look_only(world);
    if (what == "unwind") return unwind(std::move(world));
    if (what == "late") return gather_late(world);
    if (what == "helpers") return have_helpers(world);
    if (what == "stays") return work_alone(world);
    if (what == "vanish") return end_inside(world);
    if (what == "stopped server") return leave_stopped_server(world);
    if (!what.empty()) throw std::runtime_error(what);  // unwinds through ~World
    return 0;
  } catch (const lockstep::ConfigError& error) {
    std::cout << "ConfigError: " << error.what() << std::endl;
    return 3;
  } catch (const lockstep::CommError& error) {
    std::cout << "CommError: " << error.what() << std::endl;
    return 4;
  } catch (const std::exception& error) {
    std::cout << "exception: " << error.what() << std::endl;
    return 5;
  }
  return 0;
}

}  // namespace lockstep::testing::join_probe

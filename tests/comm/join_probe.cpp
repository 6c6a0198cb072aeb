// Joins and says what it sees, or why it could not; the tests start several of these.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <iostream>
#include <string>

#include <ATen/ATen.h>
#include <lockstep/lockstep.h>

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Rank 1 ends without a word while a large broadcast from rank 0 is under way.
int end_inside(lockstep::World& world) {
  auto tensor = at::ones({256 << 20}, at::kByte);
  const auto start = Clock::now();
  try {
    auto work = world.group().broadcast(tensor);  // rank 1 may be gone by now
    if (world.rank() == 1) ::_exit(0);
    work.wait();
  } catch (const lockstep::CommError& error) {
    std::cout << "told after " << seconds_since(start) << " s: " << error.what() << std::endl;
    return seconds_since(start) < 5 ? 0 : 1;
  }
  return 1;
}

// Rank 0, which serves the store, is stopped; rank 1 is told, and leaves.
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
  return seconds_since(start) < 2 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    auto world = lockstep::World::from_environment({.backend = argc > 1 ? argv[1] : ""});
    std::cout << "rank " << world.rank() << " of " << world.size() << ", local " << world.local_rank()
              << " of " << world.local_size() << ", " << world.group().backend() << std::endl;
    world.group().barrier().wait();
    const std::string what = argc > 2 ? argv[2] : "";
    if (what == "again") {
      { auto left = std::move(world); }
      auto second = lockstep::World::from_environment({.backend = argv[1]});
      second.group().barrier().wait();
      std::cout << "joined again" << std::endl;
      return 0;
    }
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
}

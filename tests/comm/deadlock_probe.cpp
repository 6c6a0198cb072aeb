// Ranks with two groups of all ranks.
//   deadlock_probe opposite   rank 0 waits in one group, its peers in the other
//   deadlock_probe issued     the same, but rank 0 has issued its peers' operation without waiting for it
//   deadlock_probe thread     the same, but another thread of rank 0 joins its peers' operation later
//   deadlock_probe fresh      the same, and that thread has not issued an operation before
#include <cstdio>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <lockstep/lockstep.h>
#include "cmake/multicall.h"

namespace lockstep::testing::deadlock_probe {

MULTICALL_MAIN(deadlock_probe) {
  const std::string mode = argc > 1 ? argv[1] : "";
  auto world = lockstep::World::from_environment();
  std::vector<int> all;
  for (int r = 0; r < world.size(); ++r) all.push_back(r);
  auto first = world.group(), second = world.group(all, {.name = "second"});
  auto third = world.group(all, {.name = "third"});
  auto one = at::ones({4}), two = at::ones({4});
  if (mode == "differ") {
    try {
      (world.rank() == 1 ? first.broadcast(one) : first.all_reduce(one)).wait();
    } catch (const lockstep::CommError& error) {
      std::printf("rank %d: %s\n", world.rank(), std::string(name(error.kind())).c_str());
      return 3;
    }
  }
  if (world.rank() != 0) {
    if (mode == "thread") third.barrier().wait();
    first.all_reduce(one).wait();
    second.all_reduce(two).wait();
  } else if (mode == "opposite") {
    second.all_reduce(two).wait();
    first.all_reduce(one).wait();
  } else if (mode == "issued") {
    auto work = first.all_reduce(one);
    second.all_reduce(two).wait();
    work.wait();
  } else {
    std::promise<void> begun;
    std::thread other([&] {
      if (mode == "thread") third.barrier().wait();
      begun.set_value();
      std::this_thread::sleep_for(std::chrono::seconds(3));
      first.all_reduce(one).wait();
    });
    begun.get_future().wait();
    second.all_reduce(two).wait();
    other.join();
  }
  std::printf("rank %d ended\n", world.rank());
  return 0;
}

}  // namespace lockstep::testing::deadlock_probe

// Joins, prints its process, and sums tensors until a rank is gone or 60 seconds have passed. With an
// argument, the last rank skips the second sum, so that its peers wait inside it.
#include <unistd.h>

#include <chrono>
#include <iostream>
#include <string>
#include <thread>

#include <ATen/ATen.h>
#include <lockstep/lockstep.h>
#include "cmake/multicall.h"

namespace lockstep::testing::patient {

MULTICALL_MAIN(patient) {
  auto say = [](const std::string& line) { std::cout << line + "\n" << std::flush; };
  try {
    auto world = lockstep::World::from_environment();
    auto tensor = at::ones({4});
    world.group().all_reduce(tensor).wait();
    say("rank " + std::to_string(world.rank()) + " pid " + std::to_string(::getpid()));
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    if (argc > 1 && world.rank() == world.size() - 1) std::this_thread::sleep_until(end);
    while (std::chrono::steady_clock::now() < end) {
      world.group().all_reduce(tensor).wait();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return 0;
  } catch (const lockstep::Error& error) {
    say(std::string("told: ") + error.what());
    return 4;
  }
}

}  // namespace lockstep::testing::patient

// Joins, says which process it is, and adds up tensors until somebody is gone or 60 seconds have passed. Rank 0
// starts no sum after the first, so that the others wait inside theirs.
#include <unistd.h>

#include <chrono>
#include <iostream>
#include <string>
#include <thread>

#include <ATen/ATen.h>
#include <lockstep/lockstep.h>

int main() {
  auto say = [](const std::string& line) { std::cout << line + "\n" << std::flush; };
  try {
    auto world = lockstep::World::from_environment();
    auto tensor = at::ones({4});
    world.group().all_reduce(tensor).wait();
    say("rank " + std::to_string(world.rank()) + " pid " + std::to_string(::getpid()));
    if (world.rank() == 0) std::this_thread::sleep_for(std::chrono::seconds(60));
    world.group().all_reduce(tensor).wait();
    return 0;
  } catch (const lockstep::Error& error) {
    say(std::string("told: ") + error.what());
    return 4;
  }
}

// A rank for tests/cli/flight_test.py: all ranks make the same steps until one of them diverges.
//
// usage: flight_probe WHAT RANK STEP [BACKEND]
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include <ATen/ATen.h>
#include <lockstep/lockstep.h>
#include "cmake/multicall.h"

namespace lockstep::testing::flight_probe {

namespace {

int run(const std::string& what, int target, int at, const std::string& backend) {
  auto world = lockstep::World::from_environment({.backend = backend});
  auto group = world.group();
  auto pair = world.size() > 2 ? group.split(world.rank() / 2) : group;
  auto values = at::ones({100});
  for (int step = 0; step < 2000; ++step) {
    world.step(step);
    if (step == at && world.rank() == target) {
      if (what == "other") group.all_reduce(values, {.op = lockstep::ReduceOp::MAX}).wait();
      if (what == "skip") continue;
      if (what == "throw") throw std::runtime_error("the probe's own words");
      if (what == "kill") ::raise(SIGKILL);
      if (what == "leave") return 0;
      if (what == "sleep") ::sleep(60);
      if (what == "recv") group.recv(values, {.peer = (target + 1) % world.size()}).wait();
    }
    group.broadcast(values, {.root = 0}).wait();
    pair.all_reduce(values, {.op = lockstep::ReduceOp::MAX}).wait();
    if (what == "kill-inside" && step == at && world.rank() == target) {
      auto work = group.all_reduce(values, {.op = lockstep::ReduceOp::AVG});
      ::raise(SIGKILL);
    }
    group.all_reduce(values, {.op = lockstep::ReduceOp::AVG}).wait();
  }
  return 0;
}

}  // namespace

MULTICALL_MAIN(flight_probe) {
  if (argc < 4) return 2;
  return run(argv[1], std::atoi(argv[2]), std::atoi(argv[3]), argc > 4 ? argv[4] : "auto");
}

}  // namespace lockstep::testing::flight_probe

// Started by bench_launch: runs one barrier. With the argument "floor" it does not communicate.
#include <cstring>

#include <ATen/ATen.h>
#include <lockstep/lockstep.h>
#include "cmake/multicall.h"

namespace lockstep::bench::launch {

MULTICALL_MAIN(launch_barrier) {
  if (argc > 1 && std::strcmp(argv[1], "floor") == 0) {
    at::ones({4});
    return 0;
  }
  auto world = lockstep::World::from_environment({.backend = "gloo"});
  world.group().barrier().wait();
  return 0;
}

}  // namespace lockstep::bench::launch

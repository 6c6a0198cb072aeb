// What bench_launch starts: one barrier. With the argument "floor" it does not communicate at all.
#include <cstring>

#include <ATen/ATen.h>
#include <lockstep/lockstep.h>

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "floor") == 0) {
    at::ones({4});
    return 0;
  }
  auto world = lockstep::World::from_environment({.backend = "gloo"});
  world.group().barrier().wait();
}

// Ranks that end with uncaught exceptions.
//   throw_probe config|runtime|comm|caught
#include <stdexcept>
#include <string>
#include <thread>

#include <ATen/ATen.h>
#include <lockstep/lockstep.h>
#include "cmake/multicall.h"

namespace lockstep::testing::throw_probe {

namespace {

void train(const std::string& mode) {
  auto world = lockstep::World::from_environment();
  auto sum = at::ones({4});
  world.group().all_reduce(sum).wait();
  if (mode == "config") throw lockstep::ConfigError("batch_size: expected at least 1, got 0");
  if (mode == "comm" && world.rank() == 1) std::this_thread::sleep_for(std::chrono::hours(1));
  if (mode != "comm" && world.rank() == 1) throw std::runtime_error("the loss is not finite");
  world.group()
      .all_reduce(sum, {.timeout = mode == "comm" ? std::chrono::seconds(1) : std::chrono::hours(1)})
      .wait();
}

}  // namespace

MULTICALL_MAIN(throw_probe) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode != "caught") {
    train(mode);
    return 0;
  }
  try {
    train(mode);
  } catch (const std::exception&) {
    return 3;
  }
  return 0;
}

}  // namespace lockstep::testing::throw_probe

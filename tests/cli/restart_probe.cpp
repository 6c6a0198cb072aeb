// A rank of a job that is killed in its first two attempts, always at the same step count: the count starts
// at 0 in each attempt, whatever was loaded.
//   restart_probe FILE KILLED_AT   saves to FILE every 3 steps and resumes from it; FILE none: does neither
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include <ATen/ATen.h>
#include <lockstep/lockstep.h>
#include "cmake/multicall.h"

namespace lockstep::testing::restart_probe {

MULTICALL_MAIN(restart_probe) {
  const std::string file = argc > 1 ? argv[1] : "none";
  const int killed_at = argc > 2 ? std::atoi(argv[2]) : 5;
  const int attempt = std::atoi(std::getenv("LOCKSTEP_RESTART_COUNT"));
  auto world = lockstep::World::from_environment();
  std::int64_t done = 0;
  if (std::filesystem::exists(file)) done = lockstep::load(file, {.group = world.group()}).integer("done");
  auto sum = at::ones({4});
  for (int count = 1; done < 20; ++count) {
    world.group().all_reduce(sum).wait();
    world.step(count);
    ++done;
    if (file != "none" && count % 3 == 0)
      lockstep::save(file, {.values = {{"done", done}}, .group = world.group()});
    if (attempt < 2 && count == killed_at && world.rank() == 1) ::kill(::getpid(), SIGKILL);
  }
  if (world.is_main()) std::printf("%lld steps done\n", static_cast<long long>(done));
  return 0;
}

}  // namespace lockstep::testing::restart_probe

// A rank that makes steps: uses some ms of processor time, sums with its peers, logs.
//   steps_probe STEPS BUSY_MS [line] [bar] [metrics] [nan] [times] [cost]
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <lockstep/lockstep.h>
#include "cmake/multicall.h"

namespace lockstep::testing::steps_probe {

namespace {

double processor_ms() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) / 1e6;
}

template <typename F>
double ns_per_call(int calls, F&& call) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) call(i);
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() / calls;
}

}  // namespace

MULTICALL_MAIN(steps_probe) {
  const std::int64_t steps = argc > 1 ? std::atoll(argv[1]) : 10;
  const double busy = argc > 2 ? std::atof(argv[2]) : 10;
  const std::set<std::string> wants(argv + std::min(argc, 3), argv + argc);
  auto world = lockstep::World::from_environment();
  if (wants.contains("cost")) {
    const double step = ns_per_call(1'000'000, [&](int i) { world.step(i); });
    const double metric = ns_per_call(100'000, [&](int i) { world.log_metric("loss", i, i); });
    if (world.is_main()) std::printf("step() %.0f ns, log_metric() %.0f ns\n", step, metric);
    return 0;
  }
  auto sum = at::ones({16});
  std::vector<double> took;  // In ms.
  for (std::int64_t step = 0; step < steps; ++step) {
    world.step(step);
    const auto step_begin = std::chrono::steady_clock::now();
    for (const double begin = processor_ms(); processor_ms() - begin < busy;) {
    }
    world.group().all_reduce(sum).wait();
    took.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - step_begin).count());
    const double loss = 1.0 / (1.0 + static_cast<double>(step));
    if (wants.contains("metrics")) {
      world.log_metric("loss", wants.contains("nan") && step == 3 ? std::nan("") : loss);
      world.log_metric("rate, \"of\" rank", world.rank() + 0.25, 1000 + step);
      if (world.is_main()) world.log_metric("samples", 64);
    }
    if (wants.contains("line") && step % 10 == 9)
      std::printf("line %lld of %d\n", static_cast<long long>(step), world.rank());
    if (wants.contains("bar")) std::printf("\rbar %lld", static_cast<long long>(step));
    if (step % 10 == 9 || wants.contains("bar")) std::fflush(stdout);
  }
  if (world.is_main() && wants.contains("times")) {
    std::printf("took");
    for (const double ms : took) std::printf(" %.1f", ms);
    std::printf("\n");
  }
  if (world.is_main()) {
    std::printf("%sended\n", wants.contains("bar") ? "\n" : "");
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace lockstep::testing::steps_probe

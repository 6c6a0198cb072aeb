// Runs steps with known parts. Each rank measures and prints what it planted, for comparison with the
// profile.
//
//   profile_probe STEPS [sleep RANK MS] [data MS] [late RANK MS] [bytes N]
//
// Prints a line per rank and step: planted RANK STEP SLEPT CODE DATA COLLECTIVE LATENESS. The last five are
// in ms: the time asleep, the CPU time of code, the time until the loader had a sample, when the collective
// began (CLOCK_MONOTONIC), and how long the main thread was runnable without a CPU.
#include <torch/torch.h>

#include <time.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <lockstep/lockstep.h>
#include "cmake/multicall.h"

namespace lockstep::testing::profile_probe {

namespace {

struct Planted {
  int sleeper = -1, late = -1;
  double sleep_ms = 0, late_ms = 0, data_ms = 0;
  std::int64_t bytes = 4 << 20;
};

double ms_of(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) / 1e6;
}

double now_ms() { return ms_of(CLOCK_MONOTONIC); }
double thread_ms() { return ms_of(CLOCK_THREAD_CPUTIME_ID); }

double slept_ms(double ms) {
  const double begin = now_ms();
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms));
  return now_ms() - begin;
}

// Computes without operators until it has used that much CPU time, whatever else runs.
double computed_ms(double ms) {
  volatile double sum = 0;
  const double begin = thread_ms();
  while (thread_ms() < begin + ms) sum = sum + 1;
  return thread_ms() - begin;
}

// How long the calling thread has been runnable without a CPU. 0 if the kernel does not report it.
double lateness_ms() {
  std::ifstream file("/proc/thread-self/schedstat");
  double ran_ns = 0, waited_ns = 0;
  file >> ran_ns >> waited_ns;
  return waited_ns / 1e6;
}

// Known parts of one step of this rank.
struct Step {
  double slept = 0, code = 0, data = 0, collective = 0, lateness = 0;
};

struct SlowSamples {
  double ms;
  std::size_t size() const { return 1000; }
  at::Tensor get(std::size_t) const {
    slept_ms(ms);
    return torch::zeros({4});
  }
};

Planted read(int argc, char** argv) {
  Planted planted;
  for (int i = 2; i < argc;) {
    const std::string what = argv[i++];
    if (what == "sleep") {
      planted.sleeper = std::stoi(argv[i++]);
      planted.sleep_ms = std::stod(argv[i++]);
    } else if (what == "late") {
      planted.late = std::stoi(argv[i++]);
      planted.late_ms = std::stod(argv[i++]);
    } else if (what == "data") {
      planted.data_ms = std::stod(argv[i++]);
    } else if (what == "bytes") {
      planted.bytes = std::stoll(argv[i++]);
    }
  }
  return planted;
}

}  // namespace

MULTICALL_MAIN(profile_probe) {
  auto world = lockstep::World::from_environment();
  at::set_num_threads(1);
  const auto planted = read(argc, argv);
  const int steps = std::stoi(argv[1]);
  auto group = world.group();
  auto weight = torch::ones({256, 256}), input = torch::ones({256, 256});
  auto known = torch::ones({planted.bytes / 4});
  lockstep::SGD optimizer({torch::ones({1 << 20}).requires_grad_()}, {.lr = 0.1});
  optimizer.param_groups()[0].params()[0].mutable_grad() = torch::ones({1 << 20});
  lockstep::DataLoader loader(SlowSamples{planted.data_ms}, {.batch_size = 1});
  auto batch = loader.begin();
  std::vector<Step> held(static_cast<std::size_t>(steps));
  double lateness = lateness_ms();
  for (int number = 1; number <= steps; ++number) {
    Step& step = held[static_cast<std::size_t>(number - 1)];
    if (planted.data_ms > 0) {
      const double begin = now_ms();
      ++batch;
      step.data = now_ms() - begin;
    }
    for (int i = 0; i < 8; ++i) input = at::matmul(input, weight).mul_(1.0 / 256);
    if (world.rank() == planted.sleeper) step.slept = slept_ms(planted.sleep_ms);
    if (world.rank() == planted.late) step.code = computed_ms(planted.late_ms);
    step.collective = now_ms();
    group.all_reduce(known, {.op = lockstep::ReduceOp::AVG, .tag = "known"}).wait();
    optimizer.step();
    const double before = std::exchange(lateness, lateness_ms());
    step.lateness = lateness - before;
    world.step(number);
  }
  for (int number = 1; number <= steps; ++number) {
    const Step& step = held[static_cast<std::size_t>(number - 1)];
    std::printf("planted %d %d %.3f %.3f %.3f %.3f %.3f\n", world.rank(), number, step.slept, step.code,
                step.data, step.collective, step.lateness);
  }
  return 0;
}

}  // namespace lockstep::testing::profile_probe

// A step whose parts are known: what it planted, it measures itself and prints, for a test to compare.
//
//   profile_probe STEPS [sleep RANK MS] [data MS] [late RANK MS] [bytes N]
#include <torch/torch.h>

#include <time.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

#include <lockstep/lockstep.h>

namespace {

using Clock = std::chrono::steady_clock;

struct Planted {
  int sleeper = -1, late = -1;
  double sleep_ms = 0, late_ms = 0, data_ms = 0;
  std::int64_t bytes = 4 << 20;
};

double slept_ms(double ms) {
  const auto begin = Clock::now();
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms));
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

double thread_ms() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) / 1e6;
}

// Computes for so long, without an operator; of the processor's time, whoever else wants it.
void compute_ms(double ms) {
  volatile double sum = 0;
  for (const double end = thread_ms() + ms; thread_ms() < end;) sum = sum + 1;
}

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

int main(int argc, char** argv) {
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
  double slept = 0;
  for (int step = 1; step <= steps; ++step) {
    if (planted.data_ms > 0) ++batch;
    for (int i = 0; i < 8; ++i) input = at::matmul(input, weight).mul_(1.0 / 256);
    if (world.rank() == planted.sleeper) slept += slept_ms(planted.sleep_ms);
    if (world.rank() == planted.late) compute_ms(planted.late_ms);
    group.all_reduce(known, {.op = lockstep::ReduceOp::AVG, .tag = "known"}).wait();
    optimizer.step();
    world.step(step);
  }
  std::printf("slept %.3f ms a step\n", slept / steps);
}

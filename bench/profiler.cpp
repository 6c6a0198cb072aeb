// Overhead of profiling: a step with a Profiler outside its window, compared with the same step without one.
// The two alternate step by step in one process, in random order, pinned to one core, after a step that warms
// the caches. Each pair gives a ratio. The result is the mean of the middle half of all pairs that no other
// process interrupted, with a 95 percent bootstrap interval; measuring stops when that is narrower than half
// of the aim. It is given for the thread's processor time and for wall time.
//
// On a busy machine that takes too long, so the difference itself, the calls by which a World notifies its
// observers, is also measured alone, in steps that compute nothing. Then follow a step while the profiler
// records, and a span without a listener.
//
//   bench_profiler [SECONDS]
#include <torch/torch.h>

#include <sched.h>
#include <sys/resource.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <vector>

#include <lockstep/lockstep.h>

namespace {

using Clock = std::chrono::steady_clock;
constexpr double kAim = 0.001;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double now(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
}

// Counts context switches: another process on the core changes the contents of the caches.
long switches() {
  rusage usage{};
  ::getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nivcsw + usage.ru_nvcsw;
}

void pin() {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(static_cast<std::size_t>(::sched_getcpu()), &one);
  ::sched_setaffinity(0, sizeof one, &one);
}

struct Interval {
  double middle = 1, low = 0, high = INFINITY;
  double width() const { return high - low; }
};

// The mean of the middle half: an interrupt during one step of a pair is not the profiler's cost.
double middle(std::vector<double>& values) {
  const auto quarter = static_cast<std::ptrdiff_t>(values.size() / 4);
  std::nth_element(values.begin(), values.begin() + quarter, values.end());
  std::nth_element(values.begin() + quarter, values.end() - quarter, values.end());
  double sum = 0;
  for (auto at = values.begin() + quarter; at != values.end() - quarter; ++at) sum += *at;
  return sum / static_cast<double>(values.end() - values.begin() - 2 * quarter);
}

Interval interval(const std::vector<double>& values, std::mt19937_64& chance) {
  if (values.size() < 16) return {};
  auto copy = values;
  Interval found;
  found.middle = middle(copy);
  std::uniform_int_distribution<std::size_t> any(0, values.size() - 1);
  std::vector<double> again;
  for (int i = 0; i < 400; ++i) {
    for (auto& each : copy) each = values[any(chance)];
    again.push_back(middle(copy));
  }
  std::sort(again.begin(), again.end());
  found.low = again[10];
  found.high = again[389];
  return found;
}

const char* verdict(const Interval& found) {
  if (found.width() > kAim / 2) return "undecided: the interval is too wide";
  if (found.low - 1 > kAim) return "MISSED";
  return found.high - 1 <= kAim ? "reached" : "undecided: the interval contains the aim";
}

class Bench {
 public:
  Bench() : world_(lockstep::World::from_environment()) { at::set_num_threads(1); }

  // Includes a collective, because it contains code that observes operations.
  void step() {
    optimizer_.zero_grad();
    model_(input_).sum().backward();
    optimizer_.step();
    empty_step();
  }
  void empty_step() {
    world_.group().all_reduce(loss_).wait();
    world_.step(++steps_);
  }

  // block: number of steps per measurement.
  void compare(const char* what, double seconds, int block, std::int64_t first, std::int64_t last) {
    const bool records = first == 1;
    std::vector<double> cpu_ratios, wall_ratios, cpu_plain;
    std::size_t tried = 0;
    Interval found;
    const auto begin = Clock::now();
    for (std::size_t next = 1000; seconds_since(begin) < seconds;) {
      double cpu[2], wall[2];
      ++tried;
      step();
      const auto before = switches();
      const bool profiled_first = chance_() % 2 == 0;
      for (const bool profiled : {profiled_first, !profiled_first}) {
        // Constructed for both; for the step without one, destroyed again, so that construction affects the
        // caches of both equally.
        auto profiler = made(first, last);
        if (!profiled) profiler.reset();
        if (records) step();  // The first recorded event allocates what the profiler needs.
        const double c = now(CLOCK_THREAD_CPUTIME_ID), w = now(CLOCK_MONOTONIC);
        for (int i = 0; i < block; ++i) step();
        cpu[profiled] = now(CLOCK_THREAD_CPUTIME_ID) - c;
        wall[profiled] = now(CLOCK_MONOTONIC) - w;
      }
      if (!records && switches() != before) continue;
      cpu_ratios.push_back(cpu[1] / cpu[0]);
      wall_ratios.push_back(wall[1] / wall[0]);
      cpu_plain.push_back(cpu[0] / block);
      if (cpu_ratios.size() < next) continue;
      next = next * 3 / 2;
      found = interval(cpu_ratios, chance_);
      if (found.width() <= kAim / 2) break;
    }
    found = interval(cpu_ratios, chance_);
    const auto wall = interval(wall_ratios, chance_);
    std::printf("%-24s %.5f of the step without it by processor time, 95 %% in [%.5f, %.5f]", what,
                found.middle, found.low, found.high);
    if (!records) std::printf("; aim %.3f: %s", 1 + kAim, verdict(found));
    std::printf("\n%-24s %.5f by wall time, in [%.5f, %.5f]; %zu of %zu pairs of %d, a step takes %.3f ms\n",
                "", wall.middle, wall.low, wall.high, cpu_ratios.size(), tried, block,
                middle(cpu_plain) * 1e3);
  }

  // Measures the nanoseconds that a Profiler outside its window adds to a step, relative to a step's time.
  void difference(double seconds) {
    constexpr int kSteps = 200;
    std::vector<double> differences, whole;
    for (int i = 0; i < 100; ++i) {
      const double c = now(CLOCK_THREAD_CPUTIME_ID);
      step();
      whole.push_back(now(CLOCK_THREAD_CPUTIME_ID) - c);
    }
    const double step_s = middle(whole);
    const auto begin = Clock::now();
    while (seconds_since(begin) < seconds) {
      double cpu[2];
      const bool profiled_first = chance_() % 2 == 0;
      for (const bool profiled : {profiled_first, !profiled_first}) {
        auto profiler = made(1'000'000'000, 1'000'000'001);
        if (!profiled) profiler.reset();
        empty_step();
        const double c = now(CLOCK_THREAD_CPUTIME_ID);
        for (int i = 0; i < kSteps; ++i) empty_step();
        cpu[profiled] = now(CLOCK_THREAD_CPUTIME_ID) - c;
      }
      differences.push_back((cpu[1] - cpu[0]) / kSteps);
    }
    auto found = interval(differences, chance_);
    std::printf(
        "%-24s %.0f ns, 95 %% in [%.0f, %.0f], for a step's end and one operation (%zu pairs of %d)\n",
        "the difference alone", found.middle * 1e9, found.low * 1e9, found.high * 1e9, differences.size(),
        kSteps);
    found = {1 + found.middle / step_s, 1 + found.low / step_s, 1 + found.high / step_s};
    std::printf("%-24s %.5f of a step of %.3f ms, in [%.5f, %.5f]; aim %.3f: %s\n", "", found.middle,
                step_s * 1e3, found.low, found.high, 1 + kAim, verdict(found));
  }

 private:
  std::unique_ptr<lockstep::Profiler> made(std::int64_t first, std::int64_t last) {
    return std::make_unique<lockstep::Profiler>(
        world_,
        lockstep::ProfilerOptions{.first = first,
                                  .last = last,
                                  .directory = std::filesystem::temp_directory_path() / "lockstep-bench"});
  }

  lockstep::World world_;
  lockstep::DistributedDataParallel<torch::nn::Sequential> model_{
      torch::nn::Sequential(torch::nn::Linear(256, 256), torch::nn::ReLU(), torch::nn::Linear(256, 256),
                            torch::nn::ReLU(), torch::nn::Linear(256, 10)),
      world_.group()};
  lockstep::AdamW optimizer_{model_.module()->parameters(), {.lr = 1e-4}};
  at::Tensor input_ = torch::ones({64, 256}), loss_ = torch::zeros({1});
  std::int64_t steps_ = 0;
  std::mt19937_64 chance_{1};
};

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 60;
  // Each profiler warns once if its window was never reached.
  lockstep::set_log_level(lockstep::LogLevel::error);
  pin();
  Bench bench;
  for (int i = 0; i < 200; ++i) bench.step();
  bench.compare("outside its window", seconds, 1, 1'000'000'000, 1'000'000'001);
  bench.difference(seconds / 4);
  bench.compare("while recording", seconds / 4, 20, 1, 1'000'000'000);
  const auto begin = Clock::now();
  constexpr int kSpans = 50'000'000;
  for (int i = 0; i < kSpans; ++i) lockstep::detail::Span span(lockstep::detail::SpanKind::wait, "none");
  std::printf("%-24s %.2f ns\n", "a span without listener", seconds_since(begin) / kSpans * 1e9);
}

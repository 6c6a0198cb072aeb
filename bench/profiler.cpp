// What profiling costs: a step with a Profiler whose window has not come, against the same step without one,
// in alternating blocks of one process until the 95 percent interval is narrower than half of the aim; the
// same while it records; and a span that nobody hears, by itself.
//
//   bench_profiler [SECONDS]
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <vector>

#include <lockstep/lockstep.h>

namespace {

using Clock = std::chrono::steady_clock;
constexpr double kAim = 0.001;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

struct Interval {
  double ratio = 1, half = INFINITY;
};

Interval interval(const std::vector<double>& logs) {
  double mean = 0, square = 0;
  for (double each : logs) mean += each / static_cast<double>(logs.size());
  for (double each : logs) square += (each - mean) * (each - mean);
  const auto count = static_cast<double>(logs.size());
  return {std::exp(mean), count < 8 ? INFINITY : 2 * std::sqrt(square / (count - 1) / count)};
}

const char* verdict(const Interval& found) {
  if (found.half > kAim / 2) return "; aim 1.001: not decided, the interval is too wide";
  return found.ratio - 1 <= kAim ? "; aim 1.001: reached" : "; aim 1.001: MISSED";
}

class Bench {
 public:
  Bench() : world_(lockstep::World::from_environment()) { at::set_num_threads(1); }

  void step() {
    optimizer_.zero_grad();
    model_(input_).sum().backward();
    optimizer_.step();
    world_.step(++steps_);
  }

  double block() {
    const auto begin = Clock::now();
    for (int i = 0; i < 20; ++i) step();
    return seconds_since(begin) / 20;
  }

  // The ratio of a step with a Profiler to one without.
  void compare(const char* what, double seconds, std::int64_t first, std::int64_t last) {
    std::vector<double> logs;
    double plain = 0;
    const auto begin = Clock::now();
    for (Interval found; seconds_since(begin) < seconds && found.half > kAim / 2; found = interval(logs)) {
      const bool profiled_first = logs.size() % 2 == 0;
      double times[2];
      for (const bool profiled : {profiled_first, !profiled_first}) {
        std::unique_ptr<lockstep::Profiler> profiler;
        if (profiled)
          profiler = std::make_unique<lockstep::Profiler>(
              world_, lockstep::ProfilerOptions{
                          .first = first,
                          .last = last,
                          .directory = std::filesystem::temp_directory_path() / "lockstep-bench"});
        if (profiled && first == 1) step();  // the window opens
        times[profiled] = block();
      }
      logs.push_back(std::log(times[1] / times[0]));
      plain = times[0];
    }
    const auto found = interval(logs);
    std::printf("%-22s %.5f ± %.5f of the step without it, which takes %.3f ms (%zu pairs of blocks)%s\n",
                what, found.ratio, found.half, plain * 1e3, logs.size(), first == 1 ? "" : verdict(found));
  }

 private:
  lockstep::World world_;
  lockstep::DistributedDataParallel<torch::nn::Sequential> model_{
      torch::nn::Sequential(torch::nn::Linear(512, 512), torch::nn::ReLU(), torch::nn::Linear(512, 512),
                            torch::nn::ReLU(), torch::nn::Linear(512, 10)),
      world_.group()};
  lockstep::AdamW optimizer_{model_.module()->parameters(), {.lr = 1e-4}};
  at::Tensor input_ = torch::ones({64, 512});
  std::int64_t steps_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 60;
  lockstep::set_log_level(lockstep::LogLevel::error);  // windows that never come are told of, once each
  Bench bench;
  for (int i = 0; i < 40; ++i) bench.step();
  bench.compare("off, its window to come", seconds, 1'000'000'000, 1'000'000'001);
  bench.compare("while it records", seconds / 4, 1, 1'000'000'000);
  const auto begin = Clock::now();
  constexpr int kSpans = 50'000'000;
  for (int i = 0; i < kSpans; ++i) lockstep::detail::Span span(lockstep::detail::SpanKind::wait, "none");
  std::printf("%-22s %.2f ns\n", "a span nobody hears", seconds_since(begin) / kSpans * 1e9);
}

// Cost of comparing the ranks' calls before data moves (docs/reference/errors.md), next to what it protects: an
// all_reduce of one number between ranks that are threads, and the all_gather that LOCKSTEP_CHECK=1 adds on
// gloo.
#include <benchmark/benchmark.h>

#include <ATen/ATen.h>
#include <lockstep/comm/call.h>
#include <lockstep/lockstep.h>

namespace {

using namespace lockstep;

Call example(int rank, int size) {
  Call call;
  call.operation = Operation::all_reduce;
  call.dtype = Dtype::float32;
  call.rank = rank;
  call.size = size;
  call.count = 1024;
  call.shape = {32, 32};
  call.tag = "gradients of bucket 3";
  return call;
}

void compare_two(benchmark::State& state) {
  const auto a = example(0, 2), b = example(1, 2);
  for (auto _ : state) benchmark::DoNotOptimize(lockstep::detail::find_difference(a, b));
}
BENCHMARK(compare_two);

void compare_all(benchmark::State& state) {
  std::vector<Call> calls;
  std::vector<const Call*> pointers;
  for (int r = 0; r < state.range(0); ++r) calls.push_back(example(r, static_cast<int>(state.range(0))));
  for (const auto& call : calls) pointers.push_back(&call);
  for (auto _ : state) benchmark::DoNotOptimize(lockstep::detail::find_mismatch(pointers));
}
BENCHMARK(compare_all)->Arg(2)->Arg(8)->Arg(64);

// Everything that a call carries for the comparison: constructed, copied and compared.
void describe_copy_compare(benchmark::State& state) {
  for (auto _ : state) {
    const auto a = example(0, 2);
    const auto b = a;  // NOLINT: the benchmark measures this copy
    benchmark::DoNotOptimize(lockstep::detail::find_difference(a, b));
  }
}
BENCHMARK(describe_copy_compare);

void all_reduce_alone(benchmark::State& state) {
  run_threads(1, [&](World& world) {
    auto group = world.group();
    auto tensor = at::ones({1});
    for (auto _ : state) group.all_reduce(tensor).wait();
  });
}
BENCHMARK(all_reduce_alone);

}  // namespace

BENCHMARK_MAIN();

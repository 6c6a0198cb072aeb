// The core of an in-place all-reduce in shared memory: reads p buffers and writes their sum to all of them.
// Counts bytes read and written, 2 p n. Compared with a memcpy of the same number of bytes. Buffers of 32 KiB
// stay in a core's cache, those of 25 MiB in none; 12.5 MiB hold as many bfloat16 values as 25 MiB hold
// floats.
#include <benchmark/benchmark.h>

#include <cstring>
#include <string>
#include <vector>

#include <lockstep/comm/reduce/level.h>
#include <lockstep/comm/reduce/reduce.h>

namespace {

using namespace lockstep;
using detail::SimdLevel;

// Zeros, because their sum does not change.
std::vector<std::vector<char>> buffers_of(std::size_t p, std::size_t bytes) {
  return std::vector<std::vector<char>>(p, std::vector<char>(bytes, 0));
}

void push(benchmark::State& state, SimdLevel level, Dtype dtype, std::size_t p, std::size_t bytes) {
  auto buffers = buffers_of(p, bytes);
  std::vector<void*> outputs;
  for (auto& buffer : buffers) outputs.push_back(buffer.data());
  const std::vector<const void*> inputs(outputs.begin(), outputs.end());
  detail::use_simd_level(level);
  for (auto _ : state) {
    detail::reduce_tree_to_all(dtype, ReduceOp::SUM, inputs, outputs, bytes / detail::item_size(dtype));
    benchmark::ClobberMemory();
  }
  detail::use_simd_level(std::nullopt);
  state.SetBytesProcessed(static_cast<std::int64_t>(2 * p * bytes * state.iterations()));
}

void copy(benchmark::State& state, std::size_t p, std::size_t bytes) {
  auto from = buffers_of(p, bytes), to = buffers_of(p, bytes);
  for (auto _ : state) {
    for (std::size_t r = 0; r < p; ++r) std::memcpy(to[r].data(), from[r].data(), bytes);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(2 * p * bytes * state.iterations()));
}

void add(std::size_t bytes, const std::string& size) {
  for (std::size_t p : {2, 4, 8}) {
    const auto ranks = std::to_string(p) + " buffers of " + size;
    benchmark::RegisterBenchmark(("memcpy/" + ranks).c_str(),
                                 [=](benchmark::State& state) { copy(state, p, bytes); });
    for (auto dtype : {Dtype::float32, Dtype::bfloat16})
      for (auto level : {SimdLevel::portable, SimdLevel::avx2, SimdLevel::avx512})
        if (detail::supported(level))
          benchmark::RegisterBenchmark(
              ("push " + std::string(name(dtype)) + "/" + std::string(detail::name(level)) + "/" + ranks)
                  .c_str(),
              [=](benchmark::State& state) { push(state, level, dtype, p, bytes); });
  }
}

}  // namespace

int main(int argc, char** argv) {
  add(std::size_t{32} << 10, "32 KiB");
  add(std::size_t{25} << 19, "12.5 MiB");
  add(std::size_t{25} << 20, "25 MiB");
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}

// CUDA kernels behind comm/, nn/ and train/, for code that includes no CUDA. Pointers are to memory of the current device,
// rows are dense, work goes to the stream and nobody waits. Sums are in an order that does not change from run
// to run. Built where there is nvcc and LibTorch has CUDA; elsewhere available() is false, and nothing else is called.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::kernels {

enum class Number : std::uint8_t { float32, bfloat16, float16 };
using Stream = void*;  // a cudaStream_t

bool available();

// Columns are taken 8 at a time: their number must be a multiple of it, and rows must lie on 16 bytes.
constexpr std::int64_t kColumnStep = 8;

// sums[c] = sum over rows of values[., c], added up in float. scratch: as many floats as column_sum_scratch says.
std::size_t column_sum_scratch(std::int64_t rows, std::int64_t columns);
void column_sums(Number number, const void* values, std::int64_t rows, std::int64_t columns, void* sums,
                 float* scratch, Stream stream);

}  // namespace lockstep::kernels

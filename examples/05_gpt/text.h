// The training text of the GPT, as bytes from a file or synthetic, and batches drawn from it.
//
//   const auto text = gpt::synthetic_text(seed, 1 << 17);
//   const auto tokens = gpt::batch(text, {.seed = seed, .step = 3, .first = 0, .count = 16, .context = 64});
//
// Everything follows from the seed by integer arithmetic: every rank, machine and standard library gets the
// same result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

namespace gpt {

// Generates sentences with long-range dependencies: a verb agrees with a noun that may be clauses away,
// brackets close in the order in which they were opened, and questions at the end of a paragraph ask about
// its beginning.
std::string synthetic_text(std::uint64_t seed, std::size_t size);

// Throws ConfigError if the file cannot be read or is empty.
std::string read_text(const std::string& path);

struct BatchOptions {
  std::uint64_t seed = 0;
  std::int64_t step = 0;
  std::int64_t first = 0, count = 1;  // Range of samples in the step's global batch.
  std::int64_t context = 64;
};

// Returns [count, context + 1] bytes as int64: a sample's inputs and, shifted by one, its targets. A sample's
// position in the text depends on seed, step and sample number, so each rank can draw its own part of a
// batch. Throws ConfigError if the text is too short.
at::Tensor batch(const std::string& text, const BatchOptions& options);

}  // namespace gpt

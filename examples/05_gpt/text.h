// What the GPT learns from: text as bytes, a file's or made up here, and the batches that are taken from it.
//
//   const auto text = gpt::synthetic_text(seed, 1 << 17);
//   const auto tokens = gpt::batch(text, {.seed = seed, .step = 3, .first = 0, .count = 16, .context = 64});
//
// All of it follows from the seed by whole numbers alone: every rank, machine and standard library gets the
// same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

namespace gpt {

// Sentences in which words that lie far apart depend on each other: a verb has the number of a noun that a
// clause or two came after, brackets close in the order in which they were opened, and who has what at the
// end of a paragraph was said at its beginning.
std::string synthetic_text(std::uint64_t seed, std::size_t size);

// ConfigError for a file that cannot be read.
std::string read_text(const std::string& path);

struct BatchOptions {
  std::uint64_t seed = 0;
  std::int64_t step = 0;
  std::int64_t first = 0, count = 1;  // samples of the step's global batch
  std::int64_t context = 64;
};

// [count, context + 1] bytes as int64: a sample's inputs and, one later, its targets. Where in the text a
// sample lies follows from seed, step and its number, so that ranks may take any part of a batch. ConfigError
// for a text that is too short.
at::Tensor batch(const std::string& text, const BatchOptions& options);

}  // namespace gpt

// Datasets in files. All files are memory-mapped: a file of any size opens at once, and its pages are read
// when they are first touched. An invalid file throws a ConfigError that names it.
//
//   TokenFile tokens("train.bin", {.block_size = 1024});
//   for (auto& [x, y] : DataLoader(tokens, {.batch_size = 8, .shuffle = true})) ...
//
//   TensorDataset digits(read_npy("images.npy"), read_npy("labels.npy"));
//   auto train = read_mnist("data/mnist");
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include <ATen/core/Tensor.h>
#include <lockstep/data/dataset.h>

namespace lockstep {

// Reads a NumPy array of booleans, integers, floating-point or complex numbers, in C or Fortran order and
// either byte order. The tensor uses the mapped file where byte order and alignment permit; changes to it
// stay in memory.
at::Tensor read_npy(const std::string& path);

// Reads an array in idx, MNIST's format.
at::Tensor read_idx(const std::string& path);

// Reads the four unpacked MNIST files as LibTorch and torchvision do: images from 0 to 1, and labels.
TensorDataset<2> read_mnist(const std::string& folder, bool train = true);

// Reads the binary version of CIFAR-10 (cifar-10-batches-bin): images from 0 to 1 [n, 3, 32, 32], and labels.
TensorDataset<2> read_cifar10(const std::string& folder, bool train = true);

struct TokenFileOptions {
  std::int64_t block_size;             // tokens per sample
  at::ScalarType dtype = at::kUInt16;  // of the file: kUInt16 or kUInt32
  std::int64_t stride = 0;             // distance between the starts of two samples, in tokens; 0: block_size
  std::int64_t skip_bytes = 0;         // size of a header to skip; llm.c's has 1024
};

// Sample i is (x, y): block_size tokens starting at i * stride, and the same shifted by one, both int64.
// Tokens at the end that do not fill a sample are omitted.
class TokenFile {
 public:
  static constexpr bool kHandle = true;

  TokenFile(const std::string& path, TokenFileOptions options);

  std::int64_t size() const { return size_; }
  std::int64_t num_tokens() const { return num_tokens_; }
  std::array<at::Tensor, 2> get(std::int64_t index) const;
  std::array<at::Tensor, 2> get_batch(std::span<const std::int64_t> indices) const;

 private:
  TokenFileOptions options_;
  std::shared_ptr<const void> file_;
  const std::byte* tokens_;
  std::int64_t num_tokens_, size_;
};

}  // namespace lockstep

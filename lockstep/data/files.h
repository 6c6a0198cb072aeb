// Data in files. All of them are mapped, not read: a file of any size is there at once, and its pages are
// read when they are touched. A file that is not what it should be is a ConfigError that names it.
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

// An array of NumPy's: booleans, integers, floating-point and complex numbers; C or Fortran order, either
// byte order. The tensor lies in the mapped file where byte order and alignment allow it; changes to it stay
// in memory.
at::Tensor read_npy(const std::string& path);

// An array in MNIST's format, idx.
at::Tensor read_idx(const std::string& path);

// The four files of MNIST, unpacked, as LibTorch and torchvision read them: images from 0 to 1, labels.
TensorDataset<2> read_mnist(const std::string& folder, bool train = true);

// The binary version of CIFAR-10 (cifar-10-batches-bin): images from 0 to 1 [n, 3, 32, 32], labels.
TensorDataset<2> read_cifar10(const std::string& folder, bool train = true);

struct TokenFileOptions {
  std::int64_t block_size;             // tokens of a sample
  at::ScalarType dtype = at::kUInt16;  // of the file: kUInt16 or kUInt32
  std::int64_t stride = 0;             // from one sample's beginning to the next one's; 0: block_size
  std::int64_t skip_bytes = 0;         // a header; llm.c's has 1024
};

// Sample i is (x, y): block_size tokens from i * stride on, and the same shifted by one, both int64. What is
// left at the end and fills no sample is left out.
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

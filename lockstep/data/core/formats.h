// The headers of files of numbers that others wrote: NumPy's .npy, MNIST's idx, CIFAR-10's binary records.
// Bytes go in, a description comes out; nothing in a file is believed before it fits the file's size. Every
// error is a ConfigError that begins with the file's name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace lockstep::detail {

enum class Element { boolean, u8, i8, u16, i16, u32, i32, u64, i64, f16, f32, f64, c64, c128 };

std::size_t bytes_of(Element element);

struct ArrayHeader {
  Element element = Element::u8;
  bool swapped = false;  // the bytes of each number are in the order that this machine has not
  bool fortran = false;  // the first dimension varies fastest
  std::vector<std::int64_t> shape;
  std::int64_t count = 1;  // of elements
  std::size_t offset = 0;  // of the first; all of them are there
};

// Versions 1 to 3. Structured and object arrays and texts are refused: objects are pickles. As in NumPy, more
// may follow the array.
ArrayHeader parse_npy(const std::string& file, std::span<const std::byte> bytes);

// The file ends where the array does.
ArrayHeader parse_idx(const std::string& file, std::span<const std::byte> bytes);

constexpr std::size_t kCifarPixels = 3 * 32 * 32, kCifarRecord = 1 + kCifarPixels;

// How many records: a label from 0 to 9 and 3072 pixels each.
std::size_t check_cifar10(const std::string& file, std::span<const std::byte> bytes);

}  // namespace lockstep::detail

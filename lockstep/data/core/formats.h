// Parsers for the headers of foreign array files: NumPy's .npy, MNIST's idx and CIFAR-10's binary records.
// They take bytes and return a description. Every value is checked against the size of the file before it is
// used. All errors are ConfigErrors that begin with the file's name.
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
  bool swapped = false;  // true if the byte order is the opposite of this machine's
  bool fortran = false;  // the first dimension varies fastest
  std::vector<std::int64_t> shape;
  std::int64_t count = 1;  // number of elements
  std::size_t offset = 0;  // of the first element in the file; the file holds all of them
};

// Versions 1 to 3. Rejects structured arrays, object arrays (which are pickles) and strings. Like NumPy,
// accepts data after the array.
ArrayHeader parse_npy(const std::string& file, std::span<const std::byte> bytes);

// The file must end with the array.
ArrayHeader parse_idx(const std::string& file, std::span<const std::byte> bytes);

constexpr std::size_t kCifarPixels = 3 * 32 * 32, kCifarRecord = 1 + kCifarPixels;

// Returns the number of records: each has a label from 0 to 9 and 3072 pixels.
std::size_t check_cifar10(const std::string& file, std::span<const std::byte> bytes);

}  // namespace lockstep::detail

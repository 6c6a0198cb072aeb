// The safetensors format (github.com/huggingface/safetensors), without LibTorch: an 8-byte little-endian
// length, a JSON header that describes each tensor and its position, and the tensors' bytes.
//
// A header is validated before use: every tensor's bytes must lie within the file and match its dtype and
// shape, without overlaps or gaps.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::detail {

constexpr std::size_t kLengthBytes = 8;
constexpr std::uint64_t kLongestHeader = 100'000'000;  // the same limit as in Python's safetensors

struct TensorEntry {
  std::string name;
  std::string dtype;  // in the format's notation: "F32"
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;  // byte range, relative to the end of the header
  bool operator==(const TensorEntry&) const = default;
};

struct Header {
  std::vector<TensorEntry> tensors;  // in the order of their data
  std::map<std::string, std::string> metadata;
  bool operator==(const Header&) const = default;
};

// Size of one element in bytes; nullopt for a dtype that the format lacks.
std::optional<std::size_t> item_bytes(std::string_view dtype);
// Size of a whole tensor in bytes. Throws FormatError if it overflows or if the dtype is unknown.
std::uint64_t tensor_bytes(std::string_view dtype, const std::vector<std::int64_t>& shape);

// Returns the beginning of a file: the length and the header, padded so that the tensors' data begin at a
// multiple of 8. Assigns the tensors' offsets in order.
std::string encode(Header& header);

// Decodes the length of the header from a file's first 8 bytes. Throws FormatError if the file is too small
// for it.
std::uint64_t header_length(std::string_view first_bytes, std::uint64_t file_bytes);
// Parses the JSON header. data_bytes: number of bytes that follow it.
Header parse_header(std::string_view text, std::uint64_t data_bytes);

}  // namespace lockstep::detail

// The safetensors format (github.com/huggingface/safetensors), without LibTorch: 8 bytes of length,
// little-endian, a header in JSON that says of each tensor what it is and where, and the tensors' bytes.
//
// A header from outside is checked before it is believed: every tensor's bytes lie in the file and fit its
// dtype and shape, none overlap, none are left over.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::detail {

constexpr std::size_t kLengthBytes = 8;
constexpr std::uint64_t kLongestHeader = 100'000'000;  // as Python's safetensors

struct TensorEntry {
  std::string name;
  std::string dtype;  // the format's own name: "F32"
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;  // of its bytes, counted from the end of the header
  bool operator==(const TensorEntry&) const = default;
};

struct Header {
  std::vector<TensorEntry> tensors;  // in the order of their bytes
  std::map<std::string, std::string> metadata;
  bool operator==(const Header&) const = default;
};

// Bytes of one element; nothing for a dtype that is not the format's.
std::optional<std::size_t> item_bytes(std::string_view dtype);
// ... of a whole tensor; FormatError where that is no size, or the dtype is unknown.
std::uint64_t tensor_bytes(std::string_view dtype, const std::vector<std::int64_t>& shape);

// The first bytes of a file, length and all; the tensors' bytes then begin at a multiple of 8. Offsets are
// given by the order of the tensors, which is also written to them.
std::string encode(Header& header);

// The length of the header that follows the first 8 bytes; FormatError where a file of this size cannot hold
// it.
std::uint64_t header_length(std::string_view first_bytes, std::uint64_t file_bytes);
// The header from its JSON; data_bytes follow it.
Header parse_header(std::string_view text, std::uint64_t data_bytes);

}  // namespace lockstep::detail

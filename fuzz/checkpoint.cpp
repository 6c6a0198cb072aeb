// Checkpoint files from an untrusted source: the header, and the JSON in it.
//
// Input: a complete file; the same bytes are also parsed as a manifest.
#include <string>

#include <lockstep/checkpoint/format/format_error.h>
#include <lockstep/checkpoint/format/manifest.h>
#include <lockstep/checkpoint/format/safetensors.h>

#include "input.h"

namespace lockstep::fuzz {
namespace {

using namespace detail;

void manifest(std::string_view text) {
  try {
    const auto encoded = Manifest::decode(text).encode();
    require(Manifest::decode(encoded).encode() == encoded, "a manifest survives a round trip");
  } catch (const FormatError&) {
  }
}

void file(std::string_view bytes) {
  const auto length = header_length(bytes.substr(0, kLengthBytes), bytes.size());
  require(length <= bytes.size() - kLengthBytes, "the header lies in the file");
  const auto data_bytes = bytes.size() - kLengthBytes - length;
  const auto header = parse_header(bytes.substr(kLengthBytes, length), data_bytes);
  std::uint64_t at = 0;
  for (const auto& tensor : header.tensors) {
    require(tensor.begin == at && tensor.end >= at && tensor.end <= data_bytes,
            "tensors are contiguous in the file");
    require(tensor.end - tensor.begin == tensor_bytes(tensor.dtype, tensor.shape),
            "a tensor's size matches its shape");
    at = tensor.end;
  }
  require(at == data_bytes, "no bytes are left over");
  auto copy = header;
  const auto encoded = encode(copy);
  require(parse_header(std::string_view(encoded).substr(kLengthBytes), data_bytes) == header,
          "a header survives a round trip");
  if (const auto found = header.metadata.find("lockstep"); found != header.metadata.end())
    manifest(found->second);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = Input(data, size).rest();
  manifest(bytes);
  try {
    file(bytes);
  } catch (const FormatError&) {
  }
  return 0;
}

}  // namespace lockstep::fuzz

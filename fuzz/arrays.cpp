// Parsers of array file headers: .npy, idx and CIFAR-10. The first byte selects one.
#include <string>

#include <lockstep/base/error.h>
#include <lockstep/data/core/formats.h>

#include "input.h"

namespace lockstep::fuzz {
namespace {

void check(const detail::ArrayHeader& header, std::size_t size) {
  require(header.shape.size() <= 64, "a shape has at most 64 dimensions");
  require(header.count >= 0, "the number of elements is not negative");
  std::int64_t count = 1;
  bool empty = false;
  for (const auto each : header.shape) {
    require(each >= 0, "no dimension is negative");
    empty = empty || each == 0;
    require(each == 0 || !__builtin_mul_overflow(count, each, &count),
            "the product of the dimensions does not overflow");
  }
  require(header.count == (empty ? 0 : count), "the number of elements matches the shape");
  const auto element = detail::bytes_of(header.element);
  require(header.offset <= size && static_cast<std::size_t>(header.count) <= (size - header.offset) / element,
          "the elements are in the file");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  const auto kind = input.byte() % 3;
  const auto rest = input.rest();
  const auto bytes = std::as_bytes(std::span(rest.data(), rest.size()));
  try {
    if (kind == 0) check(detail::parse_npy("FILE", bytes), bytes.size());
    if (kind == 1) check(detail::parse_idx("FILE", bytes), bytes.size());
    if (kind == 2)
      require(detail::check_cifar10("FILE", bytes) * detail::kCifarRecord == bytes.size(),
              "records fill the file");
  } catch (const ConfigError& error) {
    require(std::string_view(error.what()).substr(0, 6) == "FILE: ", "an error names the file");
  }
  return 0;
}

}  // namespace lockstep::fuzz

#include <lockstep/data/core/formats.h>

#include <bit>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include <lockstep/base/error.h>

namespace lockstep::detail {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
constexpr std::size_t kMostDimensions = 64;  // NumPy's limit
constexpr std::size_t kMostHeader = 1 << 16;

[[noreturn]] void refuse(const std::string& file, const std::string& what) {
  throw ConfigError(file + ": " + what);
}

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void refuse_compressed(const std::string& file, std::string_view text) {
  if (text.starts_with("\x1f\x8b")) refuse(file, "file is gzip-compressed; unpack it first (gunzip)");
  if (text.starts_with("PK\x03\x04")) refuse(file, "file is a zip archive (.npz); unpack it first (unzip)");
}

// Computes the number of elements and checks that the file holds all of them.
void measure(const std::string& file, ArrayHeader& header, std::size_t file_size) {
  const auto size = static_cast<std::int64_t>(bytes_of(header.element));
  std::int64_t bytes = size;  // excludes dimensions of 0, so that strides can be computed too
  bool empty = false;
  for (const auto each : header.shape) {
    if (each == 0)
      empty = true;
    else if (each > kMost / bytes)
      refuse(file, "the shape has more elements than a file can hold");
    else
      bytes *= each;
  }
  header.count = empty ? 0 : bytes / size;
  const auto there = file_size - header.offset;
  if (!empty && static_cast<std::uint64_t>(bytes) > there)
    refuse(file, "truncated file: expected " + std::to_string(bytes) + " bytes of array data, got " +
                     std::to_string(there));
}

// Parser for the header of an .npy file: a Python dictionary literal.
class Dictionary {
 public:
  Dictionary(const std::string& file, std::string_view text) : file_(file), text_(text) {}

  ArrayHeader read() {
    std::optional<std::string> type;
    std::optional<bool> fortran;
    std::optional<std::vector<std::int64_t>> shape;
    expect('{');
    while (!take('}')) {
      const auto key = string();
      expect(':');
      if (key == "descr" && !type) {
        if (peek() == '[') wrong("structured arrays are not supported");
        type = string();
      } else if (key == "fortran_order" && !fortran) {
        fortran = boolean();
      } else if (key == "shape" && !shape) {
        shape = numbers();
      } else {
        wrong("unknown or duplicate key '" + key + "'");
      }
      if (!take(',') && peek() != '}') wrong("expected ',' or '}'");
    }
    if (peek() != '\0' || place_ < text_.size()) wrong("unexpected text after the dictionary");
    if (!type || !fortran || !shape) wrong("'descr', 'fortran_order' or 'shape' is missing");
    ArrayHeader header;
    header.fortran = *fortran;
    header.shape = std::move(*shape);
    set_type(header, *type);
    return header;
  }

 private:
  [[noreturn]] void wrong(const std::string& what) const { refuse(file_, "invalid .npy header: " + what); }

  // Skips whitespace and returns the next character; 0 at the end.
  char peek() {
    while (place_ < text_.size() && (text_[place_] == ' ' || text_[place_] == '\n')) ++place_;
    return place_ < text_.size() ? text_[place_] : '\0';
  }
  bool take(char c) {
    if (peek() != c || place_ >= text_.size()) return false;
    ++place_;
    return true;
  }
  void expect(char c) {
    if (!take(c)) wrong(std::string("expected '") + c + "'");
  }

  std::string string() {
    const char quote = peek();
    if (quote != '\'' && quote != '"') wrong("expected a quoted string");
    const auto end = text_.find(quote, ++place_);
    if (end == text_.npos) wrong("unterminated string");
    const auto found = text_.substr(place_, end - place_);
    for (const char c : found)
      if (c < ' ' || c > '~' || c == '\\') wrong("unexpected character in a string");
    place_ = end + 1;
    return std::string(found);
  }
  bool boolean() {
    peek();
    for (const bool value : {false, true}) {
      const std::string_view word = value ? "True" : "False";
      if (!text_.substr(place_).starts_with(word)) continue;
      place_ += word.size();
      return value;
    }
    wrong("'fortran_order': expected True or False");
  }
  std::vector<std::int64_t> numbers() {
    std::vector<std::int64_t> found;
    expect('(');
    while (!take(')')) {
      found.push_back(number());
      if (found.size() > kMostDimensions) wrong("the shape has more than 64 dimensions");
      if (!take(',') && peek() != ')') wrong("expected ',' or ')' in the shape");
    }
    return found;
  }
  std::int64_t number() {
    if (peek() < '0' || peek() > '9') wrong("expected a number in the shape");
    std::int64_t value = 0;
    for (; place_ < text_.size() && text_[place_] >= '0' && text_[place_] <= '9'; ++place_) {
      const int digit = text_[place_] - '0';
      if (value > (kMost - digit) / 10) wrong("a number in the shape is 2^63 or larger");
      value = value * 10 + digit;
    }
    if (place_ < text_.size() && text_[place_] == 'L') ++place_;  // written by Python 2
    return value;
  }

  void set_type(ArrayHeader& header, const std::string& type) const {
    static constexpr std::pair<std::string_view, Element> kTypes[] = {
        {"b1", Element::boolean}, {"u1", Element::u8},   {"i1", Element::i8},  {"u2", Element::u16},
        {"i2", Element::i16},     {"u4", Element::u32},  {"i4", Element::i32}, {"u8", Element::u64},
        {"i8", Element::i64},     {"f2", Element::f16},  {"f4", Element::f32}, {"f8", Element::f64},
        {"c8", Element::c64},     {"c16", Element::c128}};
    const char order = type.empty() ? '\0' : type[0];
    const bool ordered = order == '<' || order == '>' || order == '=' || order == '|';
    for (const auto& [name, element] : kTypes) {
      if (!ordered || type.substr(1) != name) continue;
      header.element = element;
      const char other = std::endian::native == std::endian::little ? '>' : '<';
      header.swapped = order == other && bytes_of(element) > 1;
      return;
    }
    wrong("unsupported type '" + type.substr(0, 64) +
          "'; expected b1, i1 to i8, u1 to u8, f2, f4, f8, c8 or c16, in either byte order");
  }

  const std::string& file_;
  std::string_view text_;
  std::size_t place_ = 0;
};

}  // namespace

std::size_t bytes_of(Element element) {
  switch (element) {
    case Element::boolean:
    case Element::u8:
    case Element::i8: return 1;
    case Element::u16:
    case Element::i16:
    case Element::f16: return 2;
    case Element::u32:
    case Element::i32:
    case Element::f32: return 4;
    case Element::u64:
    case Element::i64:
    case Element::f64:
    case Element::c64: return 8;
    case Element::c128: return 16;
  }
  throw Error("unknown element type");
}

ArrayHeader parse_npy(const std::string& file, std::span<const std::byte> bytes) {
  const auto text = text_of(bytes);
  refuse_compressed(file, text);
  if (!text.starts_with("\x93NUMPY")) refuse(file, "not an .npy file: it does not begin with \\x93NUMPY");
  const auto byte = [&](std::size_t i) {
    if (i >= bytes.size()) refuse(file, "truncated .npy header");
    return std::to_integer<std::size_t>(bytes[i]);
  };
  const auto version = byte(6);
  if (version < 1 || version > 3)
    refuse(file, "unsupported .npy version: expected 1 to 3, got " + std::to_string(version));
  const std::size_t begin = version == 1 ? 10 : 12;
  std::size_t length = 0;
  for (auto i = begin; i-- > 8;) length = length << 8 | byte(i);
  if (length > kMostHeader)
    refuse(file, "the .npy header is too long: expected at most " + std::to_string(kMostHeader) +
                     " bytes, got " + std::to_string(length));
  if (bytes.size() - begin < length) refuse(file, "truncated .npy header");
  auto header = Dictionary(file, text.substr(begin, length)).read();
  header.offset = begin + length;
  measure(file, header, bytes.size());
  return header;
}

ArrayHeader parse_idx(const std::string& file, std::span<const std::byte> bytes) {
  refuse_compressed(file, text_of(bytes));
  const auto byte = [&](std::size_t i) {
    if (i >= bytes.size()) refuse(file, "truncated idx header");
    return std::to_integer<std::uint32_t>(bytes[i]);
  };
  static constexpr std::pair<std::uint32_t, Element> kTypes[] = {{0x08, Element::u8},  {0x09, Element::i8},
                                                                 {0x0B, Element::i16}, {0x0C, Element::i32},
                                                                 {0x0D, Element::f32}, {0x0E, Element::f64}};
  std::optional<Element> element;
  for (const auto& [code, each] : kTypes)
    if (byte(0) == 0 && byte(1) == 0 && byte(2) == code) element = each;
  const auto dimensions = byte(3);
  if (!element || dimensions == 0)
    refuse(file, "not an idx file: it does not begin with 0, 0, a type code and a number of dimensions");
  if (dimensions > kMostDimensions) refuse(file, "the idx header has more than 64 dimensions");
  ArrayHeader header;
  header.element = *element;
  header.swapped = std::endian::native == std::endian::little && bytes_of(*element) > 1;
  for (std::size_t d = 0; d < dimensions; ++d) {
    std::int64_t size = 0;
    for (std::size_t i = 0; i < 4; ++i) size = size << 8 | byte(4 + 4 * d + i);
    header.shape.push_back(size);
  }
  header.offset = 4 + 4 * dimensions;
  measure(file, header, bytes.size());
  const auto end = header.offset + static_cast<std::size_t>(header.count) * bytes_of(*element);
  if (end != bytes.size())
    refuse(file, "the file has " + std::to_string(bytes.size() - end) + " bytes more than its header says");
  return header;
}

std::size_t check_cifar10(const std::string& file, std::span<const std::byte> bytes) {
  refuse_compressed(file, text_of(bytes));
  if (bytes.empty() || bytes.size() % kCifarRecord != 0)
    refuse(file, "not a CIFAR-10 binary file: expected a multiple of 3073 bytes, got " +
                     std::to_string(bytes.size()));
  const auto records = bytes.size() / kCifarRecord;
  for (std::size_t i = 0; i < records; ++i)
    if (const auto label = std::to_integer<int>(bytes[i * kCifarRecord]); label > 9)
      refuse(file, "not a CIFAR-10 binary file: record " + std::to_string(i) + " has label " +
                       std::to_string(label) + "; expected 0 to 9");
  return records;
}

}  // namespace lockstep::detail

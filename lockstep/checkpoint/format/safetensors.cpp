#include <lockstep/checkpoint/format/safetensors.h>

#include <algorithm>
#include <limits>
#include <set>

#include <fmt/format.h>
#include <lockstep/checkpoint/format/format_error.h>
#include <nlohmann/json.hpp>

namespace lockstep::detail {
namespace {

using Json = nlohmann::json;

struct DtypeName {
  std::string_view name;
  std::size_t bytes;
};
constexpr DtypeName kDtypes[] = {
    {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"I16", 2}, {"U16", 2}, {"F16", 2},
    {"BF16", 2}, {"I32", 4}, {"U32", 4}, {"F32", 4},     {"F64", 8},     {"I64", 8}, {"U64", 8}, {"C64", 8}};

// Makes text from a file safe for error messages: truncates it and replaces control characters.
std::string shown(std::string_view text) {
  std::string result;
  for (const char c : text.substr(0, 80)) result += c >= ' ' && c != 0x7f ? c : '?';
  return text.size() > 80 ? result + "..." : result;
}

// Streaming parser for the header, so that a malicious one needs no more memory than its own length. Accepts
// only {name: {"dtype": text, "shape": [...], "data_offsets": [begin, end]}, "__metadata__": {text: text}}.
class HeaderReader : public Json::json_sax_t {
 public:
  Header take() { return std::move(header_); }

  bool start_object(std::size_t) override {
    if (place_ == Place::outside)
      place_ = Place::root;
    else if (place_ == Place::root)
      place_ = name_ == "__metadata__" ? Place::metadata : Place::tensor;
    else
      wrong("an object");
    if (place_ == Place::tensor) {
      entry_ = {};
      entry_.name = name_;
      fields_ = 0;
    }
    return true;
  }

  bool key(string_t& key) override {
    if (place_ == Place::root) {
      if (!names_.insert(key).second) throw FormatError(fmt::format("duplicate name '{}'", shown(key)));
      name_ = key;
    } else if (place_ == Place::metadata) {
      if (header_.metadata.contains(key))
        throw FormatError(fmt::format("duplicate key '{}' in __metadata__", shown(key)));
      field_ = key;
    } else {
      const unsigned bit = key == "dtype" ? 1u : key == "shape" ? 2u : key == "data_offsets" ? 4u : 0u;
      if (bit == 0 || (fields_ & bit) != 0)
        throw FormatError(fmt::format("tensor '{}': {} field '{}'", shown(name_),
                                      bit == 0 ? "unknown" : "duplicate", shown(key)));
      fields_ |= bit;
      field_ = key;
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::tensor) {
      if (fields_ != 7 || offsets_ != 2)
        throw FormatError(fmt::format("tensor '{}': missing dtype, shape or data_offsets", shown(name_)));
      header_.tensors.push_back(std::move(entry_));
      offsets_ = 0;
    }
    place_ = place_ == Place::root ? Place::outside : Place::root;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ != Place::tensor || field_ == "dtype") wrong("an array");
    place_ = field_ == "shape" ? Place::shape : Place::offsets;
    return true;
  }
  bool end_array() override {
    place_ = Place::tensor;
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::metadata)
      header_.metadata.emplace(field_, std::move(value));
    else if (place_ == Place::tensor && field_ == "dtype")
      entry_.dtype = std::move(value);
    else
      wrong("a string");
    return true;
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
      wrong("a number that is too large");
    if (place_ == Place::shape) {
      if (entry_.shape.size() == 64)
        throw FormatError(fmt::format("tensor '{}': more than 64 dimensions", shown(name_)));
      entry_.shape.push_back(static_cast<std::int64_t>(value));
    } else if (place_ == Place::offsets && offsets_ < 2) {
      (offsets_++ == 0 ? entry_.begin : entry_.end) = value;
    } else {
      wrong("a number");
    }
    return true;
  }

  bool null() override { return wrong("null"); }
  bool boolean(bool) override { return wrong("true or false"); }
  bool number_integer(number_integer_t) override { return wrong("a negative number"); }
  bool number_float(number_float_t, const string_t&) override { return wrong("a non-integer number"); }
  bool binary(binary_t&) override { return wrong("binary data"); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    throw FormatError(fmt::format("invalid header: not JSON at byte {}", position));
  }

 private:
  enum class Place { outside, root, metadata, tensor, shape, offsets };

  [[noreturn]] bool wrong(const char* what) {
    if (place_ == Place::outside)
      throw FormatError(fmt::format("invalid header: expected an object, got {}", what));
    throw FormatError(fmt::format("'{}' has {} in the wrong place", shown(name_), what));
  }

  Header header_;
  std::set<std::string> names_;
  std::string name_, field_;
  TensorEntry entry_;
  Place place_ = Place::outside;
  unsigned fields_ = 0, offsets_ = 0;
};

}  // namespace

std::optional<std::size_t> item_bytes(std::string_view dtype) {
  for (const auto& [name, bytes] : kDtypes)
    if (name == dtype) return bytes;
  return std::nullopt;
}

std::uint64_t tensor_bytes(std::string_view dtype, const std::vector<std::int64_t>& shape) {
  const auto item = item_bytes(dtype);
  if (!item) throw FormatError(fmt::format("unknown dtype '{}'", shown(dtype)));
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  std::uint64_t bytes = *item;
  for (const auto size : shape)
    if (size < 0 || __builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes))
      throw FormatError("the shape has too many elements");
  return bytes;
}

std::string encode(Header& header) {
  auto root = nlohmann::ordered_json::object();
  if (!header.metadata.empty()) root["__metadata__"] = header.metadata;
  std::uint64_t at = 0;
  for (auto& tensor : header.tensors) {
    tensor.begin = at;
    tensor.end = at += tensor_bytes(tensor.dtype, tensor.shape);
    if (tensor.name == "__metadata__" || root.contains(tensor.name))
      throw FormatError(fmt::format("duplicate tensor name '{}'", shown(tensor.name)));
    root[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {tensor.begin, tensor.end}}};
  }
  std::string text;
  try {
    text = root.dump();
  } catch (const Json::exception&) {
    throw FormatError("a name or string is not valid UTF-8");
  }
  while ((kLengthBytes + text.size()) % 8 != 0) text += ' ';
  if (text.size() > kLongestHeader) throw FormatError("too many tensors for the safetensors format");
  std::string bytes(kLengthBytes, '\0');
  for (std::size_t i = 0; i < kLengthBytes; ++i) bytes[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
  return bytes + text;
}

std::uint64_t header_length(std::string_view first_bytes, std::uint64_t file_bytes) {
  if (file_bytes < kLengthBytes || first_bytes.size() < kLengthBytes)
    throw FormatError(fmt::format("the file has {} bytes, too few for a header", file_bytes));
  std::uint64_t length = 0;
  for (std::size_t i = kLengthBytes; i-- > 0;)
    length = length << 8 | static_cast<unsigned char>(first_bytes[i]);
  if (length > kLongestHeader || length > file_bytes - kLengthBytes)
    throw FormatError(
        fmt::format("invalid header length: {} bytes in a file of {} bytes", length, file_bytes));
  return length;
}

Header parse_header(std::string_view text, std::uint64_t data_bytes) {
  HeaderReader reader;
  Json::sax_parse(text, &reader);
  auto header = reader.take();
  std::sort(header.tensors.begin(), header.tensors.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  std::uint64_t at = 0;
  for (const auto& tensor : header.tensors) {
    std::uint64_t bytes = 0;
    try {
      bytes = tensor_bytes(tensor.dtype, tensor.shape);
    } catch (const FormatError& error) {
      throw FormatError(fmt::format("tensor '{}': {}", shown(tensor.name), error.what()));
    }
    if (tensor.end < tensor.begin || tensor.end > data_bytes)
      throw FormatError(fmt::format("tensor '{}': invalid byte range {} to {} of {}", shown(tensor.name),
                                    tensor.begin, tensor.end, data_bytes));
    if (tensor.end - tensor.begin != bytes)
      throw FormatError(fmt::format("tensor '{}': expected {} bytes, got {}", shown(tensor.name), bytes,
                                    tensor.end - tensor.begin));
    if (tensor.begin != at)
      throw FormatError(fmt::format("tensor '{}' begins at byte {}, but the previous one ends at {}",
                                    shown(tensor.name), tensor.begin, at));
    at = tensor.end;
  }
  if (at != data_bytes)
    throw FormatError(
        fmt::format("the file has {} bytes of tensors, but its header describes {}", data_bytes, at));
  return header;
}

}  // namespace lockstep::detail

#include <lockstep/control/wire/frame.h>

#include <bit>
#include <cstring>

#include <fmt/format.h>

namespace lockstep::control {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

template <typename T>
void put(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

template <typename T>
T get(const char* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

}  // namespace

std::string encode(const Frame& frame) {
  if (frame.payload.size() > kMostPayload)
    throw FrameError(
        fmt::format("expected a message of at most {} bytes, got {}", kMostPayload, frame.payload.size()));
  std::string bytes;
  bytes.reserve(kHeaderSize + frame.payload.size());
  put(bytes, static_cast<std::uint32_t>(frame.payload.size()));
  put(bytes, static_cast<std::uint16_t>(frame.kind));
  put(bytes, std::uint16_t{0});
  put(bytes, frame.rank);
  put(bytes, frame.id);
  bytes += frame.payload;
  return bytes;
}

void FrameBuffer::append(std::span<const char> bytes) {
  if (taken_ > kMostPayload || taken_ == bytes_.size()) {
    bytes_.erase(0, taken_);
    taken_ = 0;
  }
  bytes_.append(bytes.data(), bytes.size());
}

std::optional<Frame> FrameBuffer::next() {
  if (size() < kHeaderSize) return std::nullopt;
  const char* header = bytes_.data() + taken_;
  const auto length = get<std::uint32_t>(header);
  const auto kind = get<std::uint16_t>(header + 4);
  if (length > kMostPayload)
    throw FrameError(fmt::format("expected a frame of at most {} bytes, got {}", kMostPayload, length));
  if (kind < 1 || kind > static_cast<std::uint16_t>(Kind::last) || get<std::uint16_t>(header + 6) != 0)
    throw FrameError(fmt::format("a frame has unknown kind {}", kind));
  if (size() < kHeaderSize + length) return std::nullopt;
  Frame frame;
  frame.kind = static_cast<Kind>(kind);
  frame.rank = get<std::int32_t>(header + 8);
  frame.id = get<std::uint32_t>(header + 12);
  frame.payload.assign(header + kHeaderSize, length);
  taken_ += kHeaderSize + length;
  return frame;
}

Writer& Writer::number(std::int64_t value) {
  put(bytes_, value);
  return *this;
}

Writer& Writer::text(std::string_view value) {
  put(bytes_, static_cast<std::uint32_t>(value.size()));
  bytes_ += value;
  return *this;
}

std::int64_t Reader::number() {
  if (left_.size() < sizeof(std::int64_t)) throw FrameError("truncated message: it ends before a number");
  const auto value = get<std::int64_t>(left_.data());
  left_.remove_prefix(sizeof value);
  return value;
}

std::int64_t Reader::number(std::int64_t lowest, std::int64_t highest) {
  const auto value = number();
  if (value < lowest || value > highest)
    throw FrameError(fmt::format("expected {} to {} in a message, got {}", lowest, highest, value));
  return value;
}

std::string Reader::text(std::size_t most) {
  if (left_.size() < sizeof(std::uint32_t)) throw FrameError("truncated message: it ends before a text");
  const auto length = get<std::uint32_t>(left_.data());
  left_.remove_prefix(sizeof length);
  if (length > left_.size() || length > most)
    throw FrameError(fmt::format("expected a text of at most {} bytes in a message, got {}",
                                 std::min(most, left_.size()), length));
  std::string value(left_.substr(0, length));
  left_.remove_prefix(length);
  return value;
}

void Reader::end() const {
  if (!left_.empty()) throw FrameError(fmt::format("a message has {} bytes too many", left_.size()));
}

}  // namespace lockstep::control

// The control plane's wire format: a fixed header and a payload of bounded length, little-endian.
//
// Every number from a peer is checked before it is used; an invalid one is a FrameError, after which the
// connection is closed. Nothing here allocates more than a frame's limit.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/base/error.h>

namespace lockstep::control {

class FrameError : public Error {
 public:
  using Error::Error;
};

enum class Kind : std::uint16_t {
  // rank -> agent -> coordinator
  hello = 1,
  attached,
  group,
  fault,
  leave,
  stop,
  stop_count,
  missing,
  store,
  // coordinator -> agent -> rank
  attach,
  welcome,
  refused,
  reply,
  verdict,
  stop_prepare,
  stop_at,
  // agent <-> coordinator
  node_hello,
  node_done,
  rank_ended,
  rows,
  order,
  ping,
  flight,
  last = flight,
};

struct Frame {
  Kind kind{};
  std::int32_t rank = -1;  // The rank concerned; -1: all, or the node itself.
  std::uint32_t id = 0;    // A reply has its request's id.
  std::string payload = {};
};

constexpr std::size_t kHeaderSize = 16;
constexpr std::size_t kMostPayload = std::size_t{1} << 20;

std::string encode(const Frame& frame);

// Collects bytes as they arrive and returns complete frames.
class FrameBuffer {
 public:
  void append(std::span<const char> bytes);
  std::optional<Frame> next();  // Throws FrameError for data that no correct peer sends.
  std::size_t size() const { return bytes_.size() - taken_; }

 private:
  std::string bytes_;
  std::size_t taken_ = 0;
};

// A payload is a sequence of numbers, texts and lists of them.
class Writer {
 public:
  Writer& number(std::int64_t value);
  Writer& text(std::string_view value);
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : left_(bytes) {}
  std::int64_t number();
  std::int64_t number(std::int64_t lowest, std::int64_t highest);
  std::int64_t number_from(std::int64_t lowest) {
    return number(lowest, std::numeric_limits<std::int64_t>::max());
  }
  int integer(int lowest, int highest) { return static_cast<int>(number(lowest, highest)); }
  std::string text(std::size_t most = kMostPayload);
  void end() const;  // Throws FrameError if data is left.

 private:
  std::string_view left_;
};

}  // namespace lockstep::control

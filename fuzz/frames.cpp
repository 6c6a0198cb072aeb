// Frames as received from a connection, and every message type that a frame may hold.
//
// Input: the number of bytes received at a time, then the bytes.
#include <string>

#include <lockstep/control/board/flight.h>
#include <lockstep/control/coordinator/store.h>
#include <lockstep/control/wire/messages.h>

#include "input.h"

namespace lockstep::fuzz {
namespace {

using namespace control;

// Every decoder must either throw FrameError or return a value that encodes to the same bytes.
void same(const std::string& encoded, std::string_view payload) {
  require(encoded == payload, "a message survives a round trip");
}

template <typename T>
void message(std::string_view payload) {
  same(T::decode(payload).encode(), payload);
}

void numbers_and_texts(std::string_view payload) {
  Reader reader(payload);
  Writer writer;
  // The payload itself selects the fields to read.
  for (const char kind : payload.substr(0, 16))
    if (kind & 1)
      writer.text(reader.text(static_cast<std::size_t>(kind & 0x7e)));
    else
      writer.number(kind & 2 ? reader.number(-kind, 1000) : reader.number());
  reader.end();
  same(writer.take(), payload);
}

void (*const kDecoders[])(std::string_view) = {
    message<Hello>,
    message<Attach>,
    message<Welcome>,
    message<GroupMade>,
    message<Fault>,
    message<Rows>,
    message<NodeHello>,
    message<RankFlight>,
    message<StoreRequest>,
    message<StoreReply>,
    [](std::string_view payload) { same(encode(decode_ended(payload)), payload); },
    [](std::string_view payload) { same(encode(decode_failure(payload)), payload); },
    [](std::string_view payload) { same(encode(decode_order(payload)), payload); },
    numbers_and_texts,
};

void look_at(const Frame& frame) {
  for (const auto decode : kDecoders) {
    try {
      decode(frame.payload);
    } catch (const FrameError&) {
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  const std::size_t at_a_time = 1 + input.byte();
  std::string_view sent = input.rest();
  const std::string_view all = sent;
  std::string again;
  FrameBuffer buffer;
  try {
    while (!sent.empty()) {
      const auto piece = sent.substr(0, at_a_time);
      sent.remove_prefix(piece.size());
      buffer.append(piece);
      require(buffer.size() <= all.size(), "the buffer holds no more than was sent");
      while (auto frame = buffer.next()) {
        again += encode(*frame);
        look_at(*frame);
      }
    }
  } catch (const FrameError&) {
  }
  require(all.starts_with(again), "frames survive a round trip");
  return 0;
}

}  // namespace lockstep::fuzz

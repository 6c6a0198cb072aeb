#include <lockstep/control/wire/frame.h>

#include <cstring>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

using namespace control;

std::string header(std::uint32_t length, std::uint16_t kind, std::uint16_t reserved = 0) {
  std::string bytes(kHeaderSize, '\0');
  std::memcpy(bytes.data(), &length, 4);
  std::memcpy(bytes.data() + 4, &kind, 2);
  std::memcpy(bytes.data() + 6, &reserved, 2);
  return bytes;
}

std::string refusal(const std::string& bytes) {
  FrameBuffer buffer;
  buffer.append(bytes);
  return error_of<FrameError>([&] { (void)buffer.next(); });
}

TEST(Frame, what_is_encoded_comes_back) {
  const std::string longest(kMostPayload, 'x');
  std::string bytes;
  for (const auto& payload : {std::string("abc"), std::string(), longest})
    bytes += encode({Kind::store, 7, 0xfffffffe, payload});
  bytes += encode({Kind::ping, -1, 0, ""});
  FrameBuffer buffer;
  // Split anywhere: a frame is returned once its last byte has arrived.
  std::vector<Frame> frames;
  for (std::size_t at = 0; at < bytes.size();) {
    const std::size_t size = at < 100 ? 1 : std::min<std::size_t>(65536, bytes.size() - at);
    buffer.append({bytes.data() + at, size});
    at += size;
    while (auto frame = buffer.next()) frames.push_back(std::move(*frame));
  }
  ASSERT_EQ(frames.size(), 4);
  EXPECT_EQ(frames[0].kind, Kind::store);
  EXPECT_EQ(frames[0].rank, 7);
  EXPECT_EQ(frames[0].id, 0xfffffffe);
  EXPECT_EQ(frames[0].payload, "abc");
  EXPECT_EQ(frames[1].payload, "");
  EXPECT_EQ(frames[2].payload, longest);
  EXPECT_EQ(frames[3].kind, Kind::ping);
  EXPECT_EQ(frames[3].rank, -1);
  EXPECT_EQ(buffer.size(), 0);
}

TEST(Frame, many_frames_leave_no_room_behind) {
  FrameBuffer buffer;
  const auto bytes = encode({Kind::store, 0, 0, std::string(1000, 'x')});
  for (int i = 0; i < 10000; ++i) {
    buffer.append(bytes);
    ASSERT_TRUE(buffer.next());
  }
  EXPECT_EQ(buffer.size(), 0);
}

TEST(Frame, a_header_is_checked_before_its_payload_has_come) {
  EXPECT_THAT(refusal(header(kMostPayload + 1, 1)), HasSubstr(std::to_string(kMostPayload + 1)));
  EXPECT_THAT(refusal(header(0xffffffff, 1)), HasSubstr("4294967295"));
  EXPECT_THAT(refusal(header(8, 0)), HasSubstr("kind 0"));
  const auto beyond = static_cast<std::uint16_t>(static_cast<int>(Kind::last) + 1);
  EXPECT_THAT(refusal(header(8, beyond)), HasSubstr("unknown kind"));
  EXPECT_THAT(refusal(header(8, 1, 1)), HasSubstr("unknown kind"));
  EXPECT_THAT(refusal("GET / HTTP/1.1\r\n\r\n"), HasSubstr("expected a frame of at most"));
  EXPECT_THAT(
      error_of<FrameError>([] { (void)encode({Kind::store, 0, 0, std::string(kMostPayload + 1, 'x')}); }),
      HasSubstr("at most"));
}

TEST(Frame, a_payload_is_read_as_it_was_written) {
  const auto bytes = Writer().number(-5).text("word").text("").number(INT64_MAX).take();
  Reader reader(bytes);
  EXPECT_EQ(reader.number(), -5);
  EXPECT_EQ(reader.text(), "word");
  EXPECT_EQ(reader.text(), "");
  EXPECT_EQ(reader.number(), INT64_MAX);
  reader.end();
  EXPECT_THROW(reader.number(), FrameError);
}

TEST(Frame, a_payload_that_does_not_fit_is_refused) {
  const auto number = Writer().number(9).take(), text = Writer().text("word").take();
  EXPECT_THAT(error_of<FrameError>([&] { Reader(number).number(0, 8); }), HasSubstr("0 to 8"));
  EXPECT_THAT(error_of<FrameError>([&] { Reader(number).integer(10, 12); }), HasSubstr("10 to 12"));
  EXPECT_THAT(error_of<FrameError>([&] { Reader(number.substr(1)).number(); }), HasSubstr("ends before"));
  EXPECT_THAT(error_of<FrameError>([&] { Reader(text).text(3); }), HasSubstr("at most 3 bytes"));
  EXPECT_THAT(error_of<FrameError>([&] { Reader(text.substr(0, 7)).text(); }), HasSubstr("at most 3 bytes"));
  EXPECT_THAT(error_of<FrameError>([&] { Reader("abc").text(); }), HasSubstr("ends before"));
  EXPECT_THAT(error_of<FrameError>([&] { Reader(std::string(4, '\xff')).text(); }), HasSubstr("4294967295"));
  EXPECT_THAT(error_of<FrameError>([&] { Reader("abc").end(); }), HasSubstr("3 bytes too many"));
}

}  // namespace
}  // namespace lockstep::testing

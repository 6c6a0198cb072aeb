#include <lockstep/metrics/event_file.h>

#include <array>
#include <bit>

#include <fmt/format.h>

namespace lockstep::detail {
namespace {

constexpr std::array<std::uint32_t, 256> crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? 0x82f63b78u : 0);
    table[i] = value;
  }
  return table;
}

template <typename T>
void put_fixed(std::string& out, T value) {  // Little-endian on every machine.
  for (std::size_t i = 0; i < sizeof value; ++i) out += static_cast<char>((value >> (8 * i)) & 0xff);
}

void put_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>((value & 0x7f) | 0x80);
  out += static_cast<char>(value);
}

// Protobuf wire types: how the value after a field's key is encoded.
enum Wire { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };
void put_key(std::string& out, int field, Wire wire) {
  put_varint(out, static_cast<unsigned>(field << 3 | wire));
}

void put_text(std::string& out, int field, std::string_view text) {
  put_key(out, field, bytes);
  put_varint(out, text.size());
  out += text;
}

std::string event_at(double time) {
  std::string event;
  put_key(event, 1, fixed64);  // wall_time
  put_fixed(event, std::bit_cast<std::uint64_t>(time));
  return event;
}

}  // namespace

std::uint32_t crc32c(std::string_view text) {
  static constexpr auto kTable = crc_table();
  std::uint32_t value = ~0u;
  for (const char c : text) value = kTable[(value ^ static_cast<unsigned char>(c)) & 0xff] ^ (value >> 8);
  return ~value;
}

std::uint32_t masked_crc32c(std::string_view text) { return std::rotr(crc32c(text), 15) + 0xa282ead8u; }

std::string tf_record(std::string_view content) {
  std::string record;
  put_fixed(record, static_cast<std::uint64_t>(content.size()));
  put_fixed(record, masked_crc32c(record));
  record += content;
  put_fixed(record, masked_crc32c(content));
  return record;
}

std::string event_file_header(double time) {
  auto event = event_at(time);
  put_text(event, 3, "brain.Event:2");  // file_version
  return tf_record(event);
}

std::string scalar_event(double time, std::int64_t step, std::string_view tag, double value) {
  std::string scalar, summary;
  put_text(scalar, 1, tag);
  put_key(scalar, 2, fixed32);  // simple_value
  put_fixed(scalar, std::bit_cast<std::uint32_t>(static_cast<float>(value)));
  put_text(summary, 1, scalar);  // value
  auto event = event_at(time);
  put_key(event, 2, varint);  // step
  put_varint(event, static_cast<std::uint64_t>(step));
  put_text(event, 5, summary);
  return tf_record(event);
}

std::string event_file_name(double time, std::string_view host, int pid, int number) {
  return fmt::format("events.out.tfevents.{:010}.{}.{}.{}", static_cast<std::int64_t>(time), host, pid,
                     number);
}

}  // namespace lockstep::detail

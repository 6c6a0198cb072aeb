// TensorBoard event files: records with checksums (TFRecord), each holding a protobuf Event, encoded by hand.
// Implements only what scalars need.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::detail {

// CRC-32C (Castagnoli), and its masked form used by the records.
std::uint32_t crc32c(std::string_view bytes);
std::uint32_t masked_crc32c(std::string_view bytes);

// A record: length, its checksum, the bytes, their checksum.
std::string tf_record(std::string_view bytes);

// The first record of an event file, and a record with one scalar. Time is in seconds since 1970.
std::string event_file_header(double time);
std::string scalar_event(double time, std::int64_t step, std::string_view tag, double value);

// "events.out.tfevents.SECONDS.HOST.PID.NUMBER": TensorBoard reads files with "tfevents" in their name, in
// this order.
std::string event_file_name(double time, std::string_view host, int pid, int number);

}  // namespace lockstep::detail

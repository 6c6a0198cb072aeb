// TensorBoard's event files: records with checksums (TFRecord), in each an Event of protobuf, written by
// hand. No more of it than scalars need.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::detail {

// The CRC of Castagnoli, and as the records have it.
std::uint32_t crc32c(std::string_view bytes);
std::uint32_t masked_crc32c(std::string_view bytes);

// A record: length, its checksum, the bytes, their checksum.
std::string tf_record(std::string_view bytes);

// What an event file begins with, and one scalar; both are whole records. Time: seconds since 1970.
std::string event_file_header(double time);
std::string scalar_event(double time, std::int64_t step, std::string_view tag, double value);

// "events.out.tfevents.SECONDS.HOST.PID.NUMBER": TensorBoard takes files with "tfevents" in their name, in
// this order.
std::string event_file_name(double time, std::string_view host, int pid, int number);

}  // namespace lockstep::detail

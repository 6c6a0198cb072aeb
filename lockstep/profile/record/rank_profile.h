// One rank's recording, and its file format. Times are nanoseconds on the host's steady clock, relative to
// `origin`.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <lockstep/base/span.h>
#include <lockstep/comm/call.h>

namespace lockstep::profile {

using detail::SpanKind;

// A thread's activity, or an operator within one. Events of a thread are nested.
struct Event {
  SpanKind kind{};
  std::int32_t name = 0;  // index into names
  std::int32_t thread = 0;
  std::int32_t depth = 0;
  std::int64_t begin = 0, end = 0;
  // The thread's CPU time. Set only where the outermost span that says what the thread does begins or ends;
  // else -1.
  std::int64_t cpu_begin = -1, cpu_end = -1;
  std::int64_t bytes = 0;
  std::int64_t flops = 0;
  std::int64_t transfer = -1;  // of a wait: index into transfers; -1: unknown
};

// A communication operation of the job, from its start to the moment its end was seen.
struct Transfer {
  Operation operation{};
  std::int32_t group = 0;  // index into groups
  std::uint64_t sequence = 0;
  std::int64_t bytes = 0;
  std::int32_t tag = 0;  // index into names
  int peer = -1;         // of a message: the peer's rank in the group
  std::int64_t nth = 0;  // of a message: its number among those with this peer and tag
  std::int64_t begin = 0, end = 0;
  bool unfinished = false;  // True if it failed or did not end within the window
};

struct GroupOf {
  std::int64_t key = 0;  // identical on every member and unique to this group
  std::string name;
  int place = 0, size = 1;
};

struct StepOf {
  std::int64_t step = 0, begin = 0, end = 0;
};

struct Sample {
  std::int64_t time = 0, bytes = 0;
};

// A device activity, as seen from its stream.
enum class DeviceKind : std::uint8_t { kernel, copy, set };
constexpr int kDeviceKinds = 3;

struct DeviceRow {
  int device = 0;
  std::int64_t stream = 0;
};

struct DeviceEvent {
  DeviceKind kind{};
  std::int32_t name = 0;  // index into names
  std::int32_t row = 0;   // index into device_rows
  std::int64_t begin = 0, end = 0;
  std::int32_t launched_by = -1;  // index into names: the operator; -1: unknown
  std::int32_t thread = -1;       // thread that launched it, inside one of its spans; -1: unknown
  std::int64_t launched = 0;      // time of the launch
};

struct RankProfile {
  int rank = 0, size = 1;
  std::string host, boot;  // ranks with equal boot IDs share a clock
  std::string program;
  std::int64_t origin = 0;
  std::int32_t main_thread = 0;  // the thread that calls step()
  std::vector<std::string> names, threads;
  std::vector<std::int64_t> thread_ids;  // system IDs of the threads; not in the file
  std::vector<GroupOf> groups;
  std::vector<StepOf> steps;
  std::vector<Event> events;
  std::vector<Transfer> transfers;
  std::vector<Sample> memory;
  std::vector<DeviceRow> device_rows;
  std::vector<DeviceEvent> device;
  std::map<std::string, std::string> notes;
};

// True for names such as rank-3.json.
bool is_rank_file(const std::filesystem::path& path);
// Writes DIR/rank-3.json atomically. Throws ConfigError on failure.
std::filesystem::path write(const RankProfile& profile, const std::filesystem::path& directory);
// Reads a rank's file. Throws ConfigError that describes the problem.
RankProfile read(const std::filesystem::path& file);
// Reads all ranks' files of a directory, in rank order. Throws ConfigError if there are none, or if they are
// from different runs.
std::vector<RankProfile> read_all(const std::filesystem::path& directory);

}  // namespace lockstep::profile

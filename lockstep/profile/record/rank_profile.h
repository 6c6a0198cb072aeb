// What one rank recorded, and its file. Times are nanoseconds of the host's steady clock, after `origin`.
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

// Something a thread did, or an operator in it. Of one thread they are nested.
struct Event {
  SpanKind kind{};
  std::int32_t name = 0;  // into names
  std::int32_t thread = 0;
  std::int32_t depth = 0;
  std::int64_t begin = 0, end = 0;
  // The thread's processor time, where it came from outside of all spans that say what it does, or went back
  // there; else -1.
  std::int64_t cpu_begin = -1, cpu_end = -1;
  std::int64_t bytes = 0;
  std::int64_t flops = 0;
  std::int64_t transfer = -1;  // of a wait: into transfers; -1: not known
};

// One of the job's operations, from its start to where its end was seen.
struct Transfer {
  Operation operation{};
  std::int32_t group = 0;  // into groups
  std::uint64_t sequence = 0;
  std::int64_t bytes = 0;
  std::int32_t tag = 0;  // into names
  int peer = -1;         // of a message: its place in the group
  std::int64_t nth = 0;  // of a message: of those between these two with this tag
  std::int64_t begin = 0, end = 0;
  bool unfinished = false;  // it failed, or the window was over before
};

struct GroupOf {
  std::int64_t key = 0;  // the same on every member, and of no other group
  std::string name;
  int place = 0, size = 1;
};

struct StepOf {
  std::int64_t step = 0, begin = 0, end = 0;
};

struct Sample {
  std::int64_t time = 0, bytes = 0;
};

// Something a device did, from its stream's view.
enum class DeviceKind : std::uint8_t { kernel, copy, set };
constexpr int kDeviceKinds = 3;

struct DeviceRow {
  int device = 0;
  std::int64_t stream = 0;
};

struct DeviceEvent {
  DeviceKind kind{};
  std::int32_t name = 0;  // into names
  std::int32_t row = 0;   // into device_rows
  std::int64_t begin = 0, end = 0;
  std::int32_t launched_by = -1;  // into names: the operator; -1: not known
  std::int32_t thread = -1;       // which launched it, inside one of its spans; -1: not known
  std::int64_t launched = 0;      // when
};

struct RankProfile {
  int rank = 0, size = 1;
  std::string host, boot;  // ranks with the same boot have the same clock
  std::string program;
  std::int64_t origin = 0;
  std::int32_t main_thread = 0;  // who called step()
  std::vector<std::string> names, threads;
  std::vector<std::int64_t> thread_ids;  // the system's, of the threads; not in the file
  std::vector<GroupOf> groups;
  std::vector<StepOf> steps;
  std::vector<Event> events;
  std::vector<Transfer> transfers;
  std::vector<Sample> memory;
  std::vector<DeviceRow> device_rows;
  std::vector<DeviceEvent> device;
  std::map<std::string, std::string> notes;
};

// rank-3.json, by its name.
bool is_rank_file(const std::filesystem::path& path);
// DIR/rank-3.json, whole or not at all. Throws ConfigError where it cannot be written.
std::filesystem::path write(const RankProfile& profile, const std::filesystem::path& directory);
// Throws ConfigError that says what is wrong with it.
RankProfile read(const std::filesystem::path& file);
// All ranks' files of a folder, in the order of ranks. Throws ConfigError where there is none, or where they
// are not of one run.
std::vector<RankProfile> read_all(const std::filesystem::path& directory);

}  // namespace lockstep::profile

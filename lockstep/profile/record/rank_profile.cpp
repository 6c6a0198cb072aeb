#include <lockstep/profile/record/rank_profile.h>

#include <algorithm>
#include <fstream>
#include <span>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/os/file.h>
#include <nlohmann/json.hpp>

namespace lockstep::profile {

namespace {

using Json = nlohmann::json;

constexpr const char* kFormat = "lockstep.profile/1";
constexpr int kNumOperations = static_cast<int>(Operation::recv) + 1;

Json rows(const std::vector<Event>& events) {
  auto list = Json::array();
  for (const Event& e : events)
    list.push_back({static_cast<int>(e.kind), e.name, e.thread, e.depth, e.begin, e.end, e.cpu_begin,
                    e.cpu_end, e.bytes, e.flops, e.transfer});
  return list;
}

Json rows(const std::vector<Transfer>& transfers) {
  auto list = Json::array();
  for (const Transfer& t : transfers)
    list.push_back({static_cast<int>(t.operation), t.group, t.sequence, t.bytes, t.tag, t.peer, t.nth,
                    t.begin, t.end, t.unfinished});
  return list;
}

Json rows(const std::vector<DeviceEvent>& events) {
  auto list = Json::array();
  for (const DeviceEvent& d : events)
    list.push_back(
        {static_cast<int>(d.kind), d.name, d.row, d.begin, d.end, d.launched_by, d.thread, d.launched});
  return list;
}

// Reads a number from a row and checks its range. Indices are checked against counts read before.
template <typename T>
T number(const Json& row, std::size_t place, std::int64_t least, std::int64_t most) {
  const auto value = row.at(place).get<std::int64_t>();
  if (value < least || value > most)
    throw ConfigError(fmt::format("expected {} to {}, got {}", least, most, value));
  return static_cast<T>(value);
}

constexpr std::int64_t kAny = std::int64_t{1} << 60;

Event event_of(const Json& row, const RankProfile& profile) {
  const auto names = static_cast<std::int64_t>(profile.names.size()),
             threads = static_cast<std::int64_t>(profile.threads.size());
  Event e;
  e.kind = static_cast<SpanKind>(number<int>(row, 0, 0, detail::kSpanKinds - 1));
  e.name = number<std::int32_t>(row, 1, 0, names - 1);
  e.thread = number<std::int32_t>(row, 2, 0, threads - 1);
  e.depth = number<std::int32_t>(row, 3, 0, 1 << 20);
  e.begin = number<std::int64_t>(row, 4, -kAny, kAny);
  e.end = number<std::int64_t>(row, 5, e.begin, kAny);
  e.cpu_begin = number<std::int64_t>(row, 6, -1, kAny);
  e.cpu_end = number<std::int64_t>(row, 7, -1, kAny);
  e.bytes = number<std::int64_t>(row, 8, 0, kAny);
  e.flops = number<std::int64_t>(row, 9, 0, kAny);
  e.transfer = number<std::int64_t>(row, 10, -1, static_cast<std::int64_t>(profile.transfers.size()) - 1);
  return e;
}

Transfer transfer_of(const Json& row, const RankProfile& profile) {
  Transfer t;
  t.operation = static_cast<Operation>(number<int>(row, 0, 0, kNumOperations - 1));
  t.group = number<std::int32_t>(row, 1, 0, static_cast<std::int64_t>(profile.groups.size()) - 1);
  t.sequence = number<std::uint64_t>(row, 2, 0, kAny);
  t.bytes = number<std::int64_t>(row, 3, 0, kAny);
  t.tag = number<std::int32_t>(row, 4, 0, static_cast<std::int64_t>(profile.names.size()) - 1);
  t.peer = number<int>(row, 5, -1, 1 << 20);
  t.nth = number<std::int64_t>(row, 6, 0, kAny);
  t.begin = number<std::int64_t>(row, 7, -kAny, kAny);
  t.end = number<std::int64_t>(row, 8, t.begin, kAny);
  t.unfinished = row.at(9).get<bool>();
  return t;
}

DeviceEvent device_event_of(const Json& row, const RankProfile& profile) {
  const auto last = [](const auto& list) { return static_cast<std::int64_t>(list.size()) - 1; };
  DeviceEvent d;
  d.kind = static_cast<DeviceKind>(number<int>(row, 0, 0, kDeviceKinds - 1));
  d.name = number<std::int32_t>(row, 1, 0, last(profile.names));
  d.row = number<std::int32_t>(row, 2, 0, last(profile.device_rows));
  d.begin = number<std::int64_t>(row, 3, -kAny, kAny);
  d.end = number<std::int64_t>(row, 4, d.begin, kAny);
  d.launched_by = number<std::int32_t>(row, 5, -1, last(profile.names));
  d.thread = number<std::int32_t>(row, 6, -1, last(profile.threads));
  d.launched = number<std::int64_t>(row, 7, -kAny, kAny);
  return d;
}

RankProfile from(const Json& text) {
  if (text.at("format") != kFormat)
    throw ConfigError(fmt::format("format: expected '{}', got {}", kFormat, text.at("format").dump()));
  RankProfile p;
  p.size = text.at("size").get<int>();
  p.rank = text.at("rank").get<int>();
  if (p.size < 1 || p.rank < 0 || p.rank >= p.size)
    throw ConfigError(fmt::format("invalid rank {} of {}", p.rank, p.size));
  p.host = text.at("host");
  p.boot = text.at("boot");
  p.program = text.at("program");
  p.origin = text.at("origin");
  if (p.origin < -kAny || p.origin > kAny) throw ConfigError("'origin' is out of range");
  p.names = text.at("names").get<std::vector<std::string>>();
  p.threads = text.at("threads").get<std::vector<std::string>>();
  p.main_thread = text.at("main_thread");
  for (const auto& row : text.at("groups"))
    p.groups.push_back({row.at(0), row.at(1), row.at(2), number<int>(row, 3, 1, 1 << 20)});
  for (const auto& row : text.at("steps")) {
    const auto begin = number<std::int64_t>(row, 1, -kAny, kAny);
    p.steps.push_back({row.at(0), begin, number<std::int64_t>(row, 2, begin, kAny)});
  }
  for (const auto& row : text.at("transfers")) p.transfers.push_back(transfer_of(row, p));
  for (const auto& row : text.at("events")) p.events.push_back(event_of(row, p));
  for (const auto& row : text.at("memory")) p.memory.push_back({row.at(0), row.at(1)});
  if (text.contains("device")) {  // absent without a device and in older files
    for (const auto& row : text.at("device_rows"))
      p.device_rows.push_back({number<int>(row, 0, 0, 1 << 20), row.at(1)});
    for (const auto& row : text.at("device")) p.device.push_back(device_event_of(row, p));
  }
  p.notes = text.at("notes").get<std::map<std::string, std::string>>();
  return p;
}

}  // namespace

bool is_rank_file(const std::filesystem::path& path) {
  const auto name = path.filename().string();
  return name.starts_with("rank-") && name.ends_with(".json");
}

std::filesystem::path write(const RankProfile& profile, const std::filesystem::path& directory) {
  std::error_code trouble;
  std::filesystem::create_directories(directory, trouble);  // writing the file will report errors
  auto groups = Json::array(), steps = Json::array(), memory = Json::array();
  for (const auto& g : profile.groups) groups.push_back({g.key, g.name, g.place, g.size});
  for (const auto& s : profile.steps) steps.push_back({s.step, s.begin, s.end});
  for (const auto& m : profile.memory) memory.push_back({m.time, m.bytes});
  Json text{{"format", kFormat},
            {"rank", profile.rank},
            {"size", profile.size},
            {"host", profile.host},
            {"boot", profile.boot},
            {"program", profile.program},
            {"origin", profile.origin},
            {"main_thread", profile.main_thread},
            {"names", profile.names},
            {"threads", profile.threads},
            {"groups", groups},
            {"steps", steps},
            {"events", rows(profile.events)},
            {"transfers", rows(profile.transfers)},
            {"memory", memory},
            {"notes", profile.notes}};
  if (!profile.device.empty()) {
    auto& device_rows = text["device_rows"] = Json::array();
    for (const auto& row : profile.device_rows) device_rows.push_back({row.device, row.stream});
    text["device"] = rows(profile.device);
  }
  const auto path = directory / fmt::format("rank-{}.json", profile.rank);
  detail::PartialFile file(path.string());
  // Names may contain any bytes; invalid UTF-8 is replaced.
  const auto bytes = text.dump(-1, ' ', false, Json::error_handler_t::replace);
  file.write(std::as_bytes(std::span(bytes)));
  file.commit();
  return path;
}

RankProfile read(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream) throw ConfigError(fmt::format("cannot read {}", file.string()));
  try {
    return from(Json::parse(stream));
  } catch (const Json::exception& error) {
    throw ConfigError(fmt::format("{} is not a valid rank profile: {}", file.string(), error.what()));
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("{} is not a valid rank profile: {}", file.string(), error.what()));
  }
}

std::vector<RankProfile> read_all(const std::filesystem::path& directory) {
  std::vector<RankProfile> profiles;
  std::error_code trouble;
  for (const auto& entry : std::filesystem::directory_iterator(directory, trouble)) {
    if (is_rank_file(entry.path())) profiles.push_back(read(entry.path()));
  }
  if (trouble) throw ConfigError(fmt::format("cannot read {}: {}", directory.string(), trouble.message()));
  if (profiles.empty())
    throw ConfigError(fmt::format("{} contains no rank profiles (rank-0.json, ...)", directory.string()));
  std::sort(profiles.begin(), profiles.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
  for (std::size_t i = 1; i < profiles.size(); ++i)
    if (profiles[i].rank == profiles[i - 1].rank)
      throw ConfigError(
          fmt::format("{} contains two profiles of rank {}", directory.string(), profiles[i].rank));
  for (const auto& profile : profiles)
    if (profile.size != profiles.front().size)
      throw ConfigError(fmt::format("{} contains profiles of different runs, with {} and {} ranks",
                                    directory.string(), profiles.front().size, profile.size));
  return profiles;
}

}  // namespace lockstep::profile

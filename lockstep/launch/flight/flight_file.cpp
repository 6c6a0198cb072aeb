#include <lockstep/launch/flight/flight_file.h>

#include <chrono>
#include <limits>
#include <utility>

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/launch/flight/flight_verdict.h>
#include <lockstep/version.h>
#include <nlohmann/json.hpp>

namespace lockstep::detail {
namespace {

using control::Ended;
using control::Failure;
using control::FlightEntry;
using control::FlightRecord;
using control::RankFlight;
using Json = nlohmann::ordered_json;

constexpr int kFormat = 1;
constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();

// Hexadecimal, because many JSON readers parse numbers as doubles, and a key has 64 bits.
std::string key_text(std::int64_t key) { return fmt::format("{:016x}", static_cast<std::uint64_t>(key)); }

Json json_of(const FlightEntry& entry) {
  Json json = {{"group", key_text(entry.key)}, {"operation", entry.operation}, {"sequence", entry.sequence}};
  if (!entry.dtype.empty())
    json["dtype"] = entry.dtype, json["count"] = entry.count, json["bytes"] = entry.bytes;
  if (!entry.reduction.empty()) json["reduction"] = entry.reduction;
  if (entry.message || entry.peer >= 0) json[entry.message ? "peer" : "root"] = entry.peer;
  if (entry.step >= 0) json["step"] = entry.step;
  json["site"] = entry.site;
  json["began_ns"] = entry.began_ns;
  json["ended_ns"] = entry.ended_ns != 0 ? Json(entry.ended_ns) : Json();
  if (entry.failed) json["failed"] = true;
  return json;
}

Json json_of(int rank, const RankFlight& flight) {
  Json json = {{"rank", rank}, {"pid", flight.pid}};
  Json ended;
  if (flight.ended) {
    ended["text"] = flight.ended->text();
    if (flight.ended->status) ended["status"] = *flight.ended->status;
    if (flight.ended->signal) ended["signal"] = *flight.ended->signal;
    if (flight.ended->core) ended["core"] = true;
    if (!flight.ended->note.empty()) ended["note"] = flight.ended->note;
  }
  json["ended"] = ended;
  if (!flight.error.empty()) json["error"] = flight.error;
  json["operations_begun"] = flight.log.begun;
  return json;  // The caller adds its operations.
}

// Texts of programs may not be UTF-8.
std::string dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

Json json_of(const Failure& failure) {
  Json json = {{"text", failure.text()}, {"rank", failure.rank},   {"pid", failure.pid},
               {"cause", failure.cause}, {"where", failure.where}, {"status", failure.status}};
  if (failure.step >= 0) json["step"] = failure.step;
  return json;
}

// A part of the file and its path, for errors.
class Part {
 public:
  Part(const Json& json, std::string path, const std::string& file)
      : json_(json), path_(std::move(path)), file_(file) {}

  [[noreturn]] void refuse(const std::string& why) const {
    throw ConfigError(fmt::format("'{}' is not a flight record of lockstep run: {}{}", file_,
                                  path_.empty() ? "" : path_ + ": ", why));
  }
  bool has(const char* name) const {
    return json_.is_object() && json_.contains(name) && !json_.at(name).is_null();
  }
  Part at(const char* name) const {
    if (!json_.is_object() || !json_.contains(name)) refuse(fmt::format("missing \"{}\"", name));
    return {json_.at(name), path_ + "/" + name, file_};
  }
  std::int64_t number(std::int64_t lowest, std::int64_t highest) const {
    if (json_.is_number_integer() && (!json_.is_number_unsigned() || json_.get<std::uint64_t>() <= kAny))
      if (const auto value = json_.get<std::int64_t>(); value >= lowest && value <= highest) return value;
    refuse(fmt::format("expected an integer from {} to {}", lowest, highest));
  }
  int integer(int lowest, int highest) const { return static_cast<int>(number(lowest, highest)); }
  // The text is printed later, so control characters are replaced: they could control the terminal.
  std::string text() const {
    if (!json_.is_string()) refuse("expected a string");
    auto text = json_.get<std::string>();
    for (std::size_t i = 0; i < text.size(); ++i) {
      const auto c = static_cast<unsigned char>(text[i]);
      if (c < ' ' || c == 127) text[i] = ' ';
      // U+0080 to U+009F are control characters too; U+009B is equivalent to ESC [.
      const auto next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0;
      if (c == 0xc2 && next >= 0x80 && next < 0xa0) text[i] = text[i + 1] = ' ';
    }
    return text;
  }
  bool boolean() const {
    if (!json_.is_boolean()) refuse("expected true or false");
    return json_.get<bool>();
  }
  std::int64_t key() const {
    const auto digits = text();
    if (digits.size() != 16 || digits.find_first_not_of("0123456789abcdef") != std::string::npos)
      refuse("expected a group's key of 16 hexadecimal digits");
    return static_cast<std::int64_t>(std::stoull(digits, nullptr, 16));
  }
  template <typename F>
  void each(F&& take) const {
    if (!json_.is_array()) refuse("expected a list");
    for (std::size_t i = 0; i < json_.size(); ++i)
      take(Part(json_[i], fmt::format("{}/{}", path_, i), file_));
  }

 private:
  const Json& json_;
  const std::string path_;
  const std::string& file_;
};

constexpr int kMostInt = std::numeric_limits<int>::max();

FlightEntry entry_of(const Part& part) {
  FlightEntry entry;
  entry.key = part.at("group").key();
  entry.operation = part.at("operation").text();
  entry.sequence = part.at("sequence").number(0, kAny);
  if (part.has("dtype")) {
    entry.dtype = part.at("dtype").text();
    entry.count = part.at("count").number(0, kAny);
    entry.bytes = part.at("bytes").number(0, kAny);
  }
  if (part.has("reduction")) entry.reduction = part.at("reduction").text();
  entry.message = part.has("peer");
  if (entry.message || part.has("root"))
    entry.peer = part.at(entry.message ? "peer" : "root").integer(-1, control::kMostRanks - 1);
  if (part.has("step")) entry.step = part.at("step").number(0, kAny);
  entry.site = part.at("site").text();
  entry.began_ns = part.at("began_ns").number(0, kAny);
  if (part.has("ended_ns")) entry.ended_ns = part.at("ended_ns").number(0, kAny);
  entry.failed = part.has("failed") && part.at("failed").boolean();
  return entry;
}

RankFlight rank_of(const Part& part) {
  RankFlight flight;
  flight.pid = part.at("pid").integer(0, kMostInt);
  if (part.has("ended")) {
    const auto ended = part.at("ended");
    flight.ended.emplace();
    if (ended.has("status")) flight.ended->status = ended.at("status").integer(0, 255);
    if (ended.has("signal")) flight.ended->signal = ended.at("signal").integer(1, 127);
    flight.ended->core = ended.has("core") && ended.at("core").boolean();
    if (ended.has("note")) flight.ended->note = ended.at("note").text();
  }
  if (part.has("error")) flight.error = part.at("error").text();
  flight.log.begun = part.at("operations_begun").number(0, kAny);
  part.at("operations").each([&](const Part& entry) { flight.log.entries.push_back(entry_of(entry)); });
  return flight;
}

}  // namespace

std::string flight_json(const FlightRecord& record) {
  const auto verdict = judge(record);
  Json json = {
      {"lockstep_flight_record", kFormat},
      {"version", kVersion},
      {"saved", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::chrono::system_clock::to_time_t(
                                                         std::chrono::system_clock::now())))},
      {"world_size", record.world_size},
      {"attempt", record.attempt},
      {"failure", record.failure ? json_of(*record.failure) : Json()},
      {"verdict", {{"text", verdict.text}, {"kind", name(verdict.kind)}, {"ranks", verdict.ranks}}}};
  if (verdict.kind != FlightVerdict::Kind::agree) {
    auto& about = json["verdict"];
    about["group"] = verdict.group;
    about["operation"] = verdict.operation;
    about["sequence"] = verdict.sequence;
    about["site"] = verdict.site;
  }
  Json& groups = json["groups"] = Json::array();
  for (const auto& [key, group] : record.groups)
    groups.push_back({{"key", key_text(key)}, {"name", group.name}, {"ranks", group.ranks}});
  // One line per operation, for readers and for grep.
  std::string text = "{\n";
  for (const auto& [name, value] : json.items()) text += fmt::format(" {}: {},\n", dump(name), dump(value));
  text += " \"ranks\": [";
  const char* before_rank = "\n";
  for (const auto& [rank, flight] : record.ranks) {
    auto head = dump(json_of(rank, flight));
    head.pop_back();
    text += fmt::format("{}  {},\"operations\":[", std::exchange(before_rank, ",\n"), head);
    const char* before = "\n";
    for (const auto& entry : flight.log.entries)
      text += fmt::format("{}   {}", std::exchange(before, ",\n"), dump(json_of(entry)));
    text += "]}";
  }
  return text + "]\n}\n";
}

FlightRecord parse_flight(std::string_view text, const std::string& file) {
  const auto json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  const Part all(json, {}, file);
  if (json.is_discarded()) all.refuse("not JSON");
  if (!json.is_object()) all.refuse("expected an object");
  all.at("lockstep_flight_record").number(kFormat, kFormat);
  FlightRecord record;
  record.world_size = all.at("world_size").integer(1, control::kMostRanks);
  record.attempt = all.at("attempt").integer(0, kMostInt);
  if (all.has("failure")) {
    const auto failure = all.at("failure");
    Failure& to = record.failure.emplace();
    to.rank = failure.at("rank").integer(-1, record.world_size - 1);
    to.pid = failure.at("pid").integer(0, kMostInt);
    to.cause = failure.at("cause").text();
    to.where = failure.at("where").text();
    to.status = failure.at("status").integer(0, 255);
    if (failure.has("step")) to.step = failure.at("step").number(0, kAny);
  }
  all.at("groups").each([&](const Part& part) {
    control::GroupMade group;
    group.key = part.at("key").key();
    group.name = part.at("name").text();
    part.at("ranks").each(
        [&](const Part& rank) { group.ranks.push_back(rank.integer(0, record.world_size - 1)); });
    record.groups[group.key] = group;
  });
  all.at("ranks").each([&](const Part& part) {
    const int rank = part.at("rank").integer(0, record.world_size - 1);
    if (record.ranks.contains(rank)) part.refuse(fmt::format("duplicate rank {}", rank));
    record.ranks[rank] = rank_of(part);
  });
  return record;
}

}  // namespace lockstep::detail

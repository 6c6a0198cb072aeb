#include <lockstep/checkpoint/format/manifest.h>

#include <cmath>
#include <limits>
#include <set>

#include <fmt/format.h>
#include <lockstep/checkpoint/format/format_error.h>
#include <nlohmann/json.hpp>

namespace lockstep::detail {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kLongest = 32 << 20;
constexpr int kDeepest = 6;

// JSON has no infinities. Numbers are marked, so that a string that looks like one remains a string.
Json number(double value) {
  if (std::isfinite(value)) return value;
  return Json{{"number", std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf"}};
}

double to_number(const Json& value) {
  if (value.is_boolean()) return value.get<bool>() ? 1 : 0;
  if (value.is_number()) return value.get<double>();
  if (value.is_object() && value.size() == 1 && value.contains("number")) {
    const auto& name = value["number"];
    if (name == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (name == "inf") return std::numeric_limits<double>::infinity();
    if (name == "-inf") return -std::numeric_limits<double>::infinity();
  }
  throw FormatError("corrupt manifest: expected a number");
}

std::int64_t to_whole(const Json& value) {
  constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<std::uint64_t>() > most))
    throw FormatError("corrupt manifest: expected an integer");
  return value.get<std::int64_t>();
}

Json to_json(const CheckpointValues& values) {
  auto result = Json::object();
  for (const auto& [name, value] : values) {
    if (const auto* whole = std::get_if<std::int64_t>(&value))
      result[name] = *whole;
    else if (const auto* real = std::get_if<double>(&value))
      result[name] = number(*real);
    else
      result[name] = std::get<std::string>(value);
  }
  return result;
}

CheckpointValues to_values(const Json& object) {
  CheckpointValues values;
  for (const auto& [name, value] : object.get_ref<const Json::object_t&>()) {
    if (value.is_string())
      values[name] = value.get<std::string>();
    else if (value.is_number_integer())
      values[name] = to_whole(value);
    else
      values[name] = to_number(value);
  }
  return values;
}

Json to_json(const OptimizerManifest& optimizer) {
  Json result = {{"kind", optimizer.kind}, {"groups", Json::array()}, {"counts", optimizer.counts}};
  for (const auto& group : optimizer.groups) {
    auto options = Json::object();
    for (const auto& [name, given] : group.options) {
      options[name] = Json::array();
      for (const double each : given) options[name].push_back(number(each));
    }
    result["groups"].push_back({{"options", options}, {"parameters", group.parameters}});
  }
  return result;
}

OptimizerManifest to_optimizer(const Json& object) {
  OptimizerManifest result;
  object.at("kind").get_to(result.kind);
  for (const auto& group : object.at("groups").get_ref<const Json::array_t&>()) {
    auto& own = result.groups.emplace_back();
    group.at("parameters").get_to(own.parameters);
    for (const auto& [name, given] : group.at("options").get_ref<const Json::object_t&>())
      for (const auto& each : given.get_ref<const Json::array_t&>())
        own.options[name].push_back(to_number(each));
  }
  for (const auto& [parameter, counts] : object.at("counts").get_ref<const Json::object_t&>()) {
    auto& own = result.counts[parameter];
    for (const auto& [name, count] : counts.get_ref<const Json::object_t&>()) own[name] = to_whole(count);
  }
  return result;
}

// Rejects duplicate keys, and nesting deeper than is ever written.
Json parse(std::string_view text) {
  if (text.size() > kLongest)
    throw FormatError(
        fmt::format("the manifest is too large: expected at most {} bytes, got {}", kLongest, text.size()));
  std::vector<std::set<std::string>> keys;
  return Json::parse(text, [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > kDeepest) throw FormatError("corrupt manifest: nested too deeply");
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second)
      throw FormatError("corrupt manifest: duplicate key");
    return true;
  });
}

template <typename F>
auto guarded(F&& decode) {
  try {
    return decode();
  } catch (const Json::exception& error) {  // its text may quote input of any length, so do not show it
    throw FormatError(fmt::format("corrupt manifest: JSON error {}", error.id));
  }
}

std::string dump(const Json& value) {
  try {
    return value.dump();
  } catch (const Json::exception&) {
    throw FormatError("a name or string is not valid UTF-8");
  }
}

}  // namespace

std::string Manifest::encode() const {
  Json root = {
      {"version", kVersion}, {"ranks", ranks}, {"states", Json::object()}, {"values", to_json(values)}};
  if (optimizer) root["optimizer"] = to_json(*optimizer);
  for (const auto& [part, by_rank] : states) {
    root["states"][part] = Json::array();
    for (const auto& state : by_rank) root["states"][part].push_back(to_json(state));
  }
  return dump(root);
}

Manifest Manifest::decode(std::string_view text) {
  return guarded([&] {
    const auto root = parse(text);
    const auto version = to_whole(root.at("version"));
    if (version != kVersion)
      throw FormatError(
          fmt::format("unsupported checkpoint version {}; this program reads version {}", version, kVersion));
    Manifest manifest;
    manifest.ranks = to_whole(root.at("ranks"));
    if (manifest.ranks < 1) throw FormatError("corrupt manifest: expected at least one rank");
    if (root.contains("optimizer")) manifest.optimizer = to_optimizer(root["optimizer"]);
    for (const auto& [part, by_rank] : root.at("states").get_ref<const Json::object_t&>()) {
      auto& own = manifest.states[part];
      for (const auto& state : by_rank.get_ref<const Json::array_t&>()) own.push_back(to_values(state));
      if (own.size() != 1 && static_cast<std::int64_t>(own.size()) != manifest.ranks)
        throw FormatError("corrupt manifest: expected one state per rank");
    }
    manifest.values = to_values(root.at("values"));
    return manifest;
  });
}

std::string Manifest::encode_state(const CheckpointValues& state) { return dump(to_json(state)); }

CheckpointValues Manifest::decode_state(std::string_view text) {
  return guarded([&] { return to_values(parse(text)); });
}

}  // namespace lockstep::detail

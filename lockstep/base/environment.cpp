#include <lockstep/base/environment.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include <fmt/format.h>
#include <lockstep/base/error.h>

namespace lockstep::env {

using std::chrono::milliseconds;

std::optional<std::string> text(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

std::optional<std::int64_t> integer(const char* name, std::int64_t lowest, std::int64_t highest) {
  auto value = text(name);
  if (!value) return std::nullopt;
  std::int64_t number = 0;
  const char* end = value->data() + value->size();
  auto [stop, error] = std::from_chars(value->data(), end, number);
  if (error != std::errc{} || stop != end || number < lowest || number > highest)
    throw detail::bad_value(name, fmt::format("an integer from {} to {}", lowest, highest), *value);
  return number;
}

bool flag(const char* name, bool fallback) {
  auto value = text(name);
  if (!value) return fallback;
  std::string lower = *value;
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  for (const char* yes : {"1", "true", "yes", "on"})
    if (lower == yes) return true;
  for (const char* no : {"0", "false", "no", "off"})
    if (lower == no) return false;
  throw detail::bad_value(name, "1, true, yes, on or 0, false, no, off", *value);
}

milliseconds parse_duration(std::string_view what, std::string_view value) {
  constexpr double kLongest = 30.0 * 24 * 3600;
  auto bad = [&] {
    return detail::bad_value(
        what, "a time above 0 and at most 30 days, such as 250ms, 30s, 5m or 2h (a plain number is seconds)",
        value);
  };
  double number = 0;
  const char* end = value.data() + value.size();
  auto [stop, error] = std::from_chars(value.data(), end, number);
  if (error != std::errc{}) throw bad();
  std::string_view unit(stop, static_cast<std::size_t>(end - stop));
  double seconds = unit.empty() || unit == "s" ? number
                   : unit == "ms"              ? number / 1e3
                   : unit == "m"               ? number * 60
                   : unit == "h"               ? number * 3600
                                               : -1;
  // Below a millisecond would round to 0, which elsewhere means "no limit".
  if (!(seconds >= 1e-3) || seconds > kLongest) throw bad();
  return milliseconds(static_cast<std::int64_t>(seconds * 1e3));
}

std::optional<milliseconds> duration(const char* name) {
  auto value = text(name);
  if (!value) return std::nullopt;
  return parse_duration(name, *value);
}

}  // namespace lockstep::env

// Reads environment variables and says exactly what is wrong with a bad one.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::env {

// Unset and empty are the same: launchers that export everything export empty variables too.
std::optional<std::string> text(const char* name);

// A decimal number in [lowest, highest]; anything else is a ConfigError that names the variable.
std::optional<std::int64_t> integer(const char* name, std::int64_t lowest, std::int64_t highest);

// 1, true, yes, on / 0, false, no, off in any case.
bool flag(const char* name, bool fallback);

// "250ms", "30s", "5m", "2h"; a plain number is seconds. Longer than nothing, at most 30 days.
std::optional<std::chrono::milliseconds> duration(const char* name);

// The same grammar for text from elsewhere; `what` names it in the error.
std::chrono::milliseconds parse_duration(std::string_view what, std::string_view value);

}  // namespace lockstep::env

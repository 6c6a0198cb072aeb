// Reads environment variables. A bad value throws a ConfigError that names the variable, what was expected
// and the value.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::env {

// Unset and empty are the same: launchers that export everything also export empty variables.
std::optional<std::string> text(const char* name);

// A decimal integer in [lowest, highest]. Throws ConfigError for anything else.
std::optional<std::int64_t> integer(const char* name, std::int64_t lowest, std::int64_t highest);

// 1, true, yes, on or 0, false, no, off; case-insensitive.
bool flag(const char* name, bool fallback);

// "250ms", "30s", "5m" or "2h"; a plain number is seconds. Above 0, at most 30 days.
std::optional<std::chrono::milliseconds> duration(const char* name);

// The same grammar for text from another source; `what` names that source in the error.
std::chrono::milliseconds parse_duration(std::string_view what, std::string_view value);

}  // namespace lockstep::env

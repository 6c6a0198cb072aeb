// Log lines for the user: to standard error, one write per line, or to the program's own sink.
// LOCKSTEP_LOG=debug|info|warn|error|off sets the level; warn by default.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

namespace lockstep {

enum class LogLevel { debug, info, warn, error, off };

using LogSink = std::function<void(LogLevel, std::string_view)>;

// Thread-safe; may be called at any time. A null sink restores standard error.
void set_log_level(LogLevel level);
void set_log_sink(LogSink sink);

namespace detail {

bool log_enabled(LogLevel level) noexcept;
void log_line(LogLevel level, std::string_view line) noexcept;
// Prefix of this thread's lines: "rank 2".
void set_log_prefix(std::string prefix);

template <typename... Args>
void log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) noexcept {
  if (!log_enabled(level)) return;
  try {
    log_line(level, fmt::format(format, std::forward<Args>(args)...));
  } catch (...) {  // A log line is never worth an exception.
  }
}

}  // namespace detail
}  // namespace lockstep

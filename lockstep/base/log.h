// A line to the person who runs the job. To standard error, one write per line, or to a sink of the
// program's own. LOCKSTEP_LOG=debug|info|warn|error|off sets what is shown; warn by default.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

namespace lockstep {

enum class LogLevel { debug, info, warn, error, off };

using LogSink = std::function<void(LogLevel, std::string_view)>;

// Both may be called at any time from any thread. A null sink brings standard error back.
void set_log_level(LogLevel level);
void set_log_sink(LogSink sink);

namespace detail {

bool log_enabled(LogLevel level) noexcept;
void log_line(LogLevel level, std::string_view line) noexcept;
// Shown before each line of this thread: "rank 2".
void set_log_prefix(std::string prefix);

template <typename... Args>
void log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) noexcept {
  if (!log_enabled(level)) return;
  try {
    log_line(level, fmt::format(format, std::forward<Args>(args)...));
  } catch (...) {  // a log line is never worth an exception
  }
}

}  // namespace detail
}  // namespace lockstep

#include <lockstep/base/log.h>

#include <unistd.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>

namespace lockstep {
namespace {

constexpr std::array kNames = {"debug", "info", "warn", "error", "off"};

// A bad value must not throw from the first log line, deep inside other code: it falls back to the default.
LogLevel level_from_environment() {
  auto value = env::text("LOCKSTEP_LOG");
  for (std::size_t i = 0; value && i < kNames.size(); ++i)
    if (*value == kNames[i]) return static_cast<LogLevel>(i);
  return LogLevel::warn;
}

std::atomic<LogLevel>& level() {
  static std::atomic<LogLevel> value = level_from_environment();
  return value;
}

struct Sink {
  std::mutex mutex;
  std::shared_ptr<LogSink> sink;
};

// Never destroyed: threads may log during static destruction.
Sink& sink() {
  static auto* value = new Sink;
  return *value;
}

thread_local std::string prefix;

}  // namespace

void set_log_level(LogLevel new_level) { level() = new_level; }

void set_log_sink(LogSink new_sink) {
  auto shared = new_sink ? std::make_shared<LogSink>(std::move(new_sink)) : nullptr;
  std::lock_guard lock(sink().mutex);
  sink().sink = std::move(shared);
}

namespace detail {

bool log_enabled(LogLevel at) noexcept { return at >= level().load(std::memory_order_relaxed); }

void set_log_prefix(std::string text) { prefix = std::move(text); }

void log_line(LogLevel at, std::string_view line) noexcept {
  if (!log_enabled(at)) return;
  try {
    std::shared_ptr<LogSink> target;
    {
      std::lock_guard lock(sink().mutex);
      target = sink().sink;
    }
    if (target) return (*target)(at, line);
    auto text = fmt::format("[lockstep{}{}] {}: {}\n", prefix.empty() ? "" : " ", prefix,
                            kNames[static_cast<std::size_t>(at)], line);
    // A single write, so that lines of several ranks on one terminal are not mixed.
    [[maybe_unused]] auto written = ::write(STDERR_FILENO, text.data(), text.size());
  } catch (...) {
  }
}

}  // namespace detail
}  // namespace lockstep

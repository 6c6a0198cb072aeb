#include <lockstep/base/span.h>

#include <mutex>
#include <utility>

namespace lockstep::detail {

namespace {

std::mutex mutex;
std::shared_ptr<SpanSink> process_sink;          // Guarded by the mutex.
std::atomic<std::uint64_t> process_version = 1;  // Incremented at each change.

thread_local std::shared_ptr<SpanSink> thread_sink;
// Cached copy of the process's sink, so that a span does not need a lock shared by all threads.
thread_local std::shared_ptr<SpanSink> seen;
thread_local std::uint64_t seen_version = 0;

}  // namespace

std::shared_ptr<SpanSink> span_sink() noexcept {
  if (!spans_wanted()) return nullptr;
  if (thread_sink) return thread_sink;
  if (const auto version = process_version.load(std::memory_order_acquire); version != seen_version) {
    std::lock_guard lock(mutex);
    seen = process_sink;
    seen_version = version;
  }
  return seen;
}

SpanListening::SpanListening(std::shared_ptr<SpanSink> sink, SpanScope scope) : scope_(scope) {
  if (scope_ == SpanScope::thread) {
    outer_ = std::exchange(thread_sink, std::move(sink));
  } else {
    std::lock_guard lock(mutex);
    outer_ = std::exchange(process_sink, std::move(sink));
    ++process_version;
  }
  ++span_sinks;
}

SpanListening::~SpanListening() {
  --span_sinks;
  if (scope_ == SpanScope::thread) {
    thread_sink = std::move(outer_);
  } else {
    std::lock_guard lock(mutex);
    process_sink = std::move(outer_);
    ++process_version;
  }
}

void Span::open(SpanKind kind, std::string_view name, std::int64_t bytes, SpanOf of) noexcept {
  sink_ = span_sink();
  if (sink_) sink_->begin(kind, name, bytes, of);
}

}  // namespace lockstep::detail

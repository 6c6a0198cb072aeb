// Profiling: a Span covers the time from its construction to the end of its scope. Without a listener, which
// is the usual case, it costs one load.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace lockstep::detail {

enum class SpanKind : std::uint8_t {
  operation,      // LibTorch's own.
  communication,  // From its start to its end, whether or not a thread waits; not nested.
  wait,           // This thread starts an operation, or waits for one.
  data,           // This thread waits for data.
  optimizer,
  pipeline,
  bucket,
  range,  // The program's own.
};
constexpr int kSpanKinds = 8;

// Identifies the operation being waited for.
struct SpanOf {
  std::int64_t group = 0;  // The group's key; 0: unknown.
  std::uint64_t sequence = 0;
  bool message = false;
};

class SpanSink {
 public:
  virtual ~SpanSink() = default;
  virtual void begin(SpanKind kind, std::string_view name, std::int64_t bytes, SpanOf of) noexcept = 0;
  virtual void end() noexcept = 0;                        // Ends the last span that this thread began.
  virtual void flops(std::int64_t /*count*/) noexcept {}  // Of the last span that this thread began.
  // A fact about the run: a pipeline's schedule, a use of memory. The last value counts.
  virtual void note(std::string_view what, std::string_view value) noexcept = 0;
};

inline constinit std::atomic<int> span_sinks = 0;

// The sink for this thread: its own, else the process's.
std::shared_ptr<SpanSink> span_sink() noexcept;
inline bool spans_wanted() noexcept { return span_sinks.load(std::memory_order_relaxed) != 0; }

enum class SpanScope { thread, process };
// While it exists, spans of this thread, or of all threads without their own sink, go to the sink.
class SpanListening {
 public:
  SpanListening(std::shared_ptr<SpanSink> sink, SpanScope scope);
  ~SpanListening();
  SpanListening(const SpanListening&) = delete;
  SpanListening& operator=(const SpanListening&) = delete;

 private:
  const SpanScope scope_;
  std::shared_ptr<SpanSink> outer_;
};

class Span {
 public:
  explicit Span(SpanKind kind, std::string_view name, std::int64_t bytes = 0, SpanOf of = {}) noexcept {
    if (spans_wanted()) [[unlikely]]
      open(kind, name, bytes, of);
  }
  ~Span() {
    if (sink_) [[unlikely]]
      sink_->end();
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  void open(SpanKind kind, std::string_view name, std::int64_t bytes, SpanOf of) noexcept;
  std::shared_ptr<SpanSink> sink_;  // May be the last reference.
};

}  // namespace lockstep::detail

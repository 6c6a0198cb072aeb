// Where a thread's time goes, for whoever profiles: a Span from here to the end of its scope. Nobody listens
// most of the time: then it costs one load.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace lockstep::detail {

enum class SpanKind : std::uint8_t {
  operation,      // LibTorch's own
  communication,  // from its start to its end, whoever waits; not nested in anything
  wait,           // this thread starts an operation, or waits for one
  data,           // this thread waits for data
  optimizer,
  pipeline,
  bucket,
  range,  // the program's own
};
constexpr int kSpanKinds = 8;

// Of a wait: which operation for.
struct SpanOf {
  std::int64_t group = 0;  // its key; 0: not said
  std::uint64_t sequence = 0;
  bool message = false;
};

class SpanSink {
 public:
  virtual ~SpanSink() = default;
  virtual void begin(SpanKind kind, std::string_view name, std::int64_t bytes, SpanOf of) noexcept = 0;
  virtual void end() noexcept = 0;                        // of the last that this thread began
  virtual void flops(std::int64_t /*count*/) noexcept {}  // of the last that this thread began
  // Something to know of the run: a pipeline's schedule, how much memory is what. The last word counts.
  virtual void note(std::string_view what, std::string_view value) noexcept = 0;
};

inline constinit std::atomic<int> span_sinks = 0;

// Of this thread's rank: the thread's own, else the process's.
std::shared_ptr<SpanSink> span_sink() noexcept;
inline bool spans_wanted() noexcept { return span_sinks.load(std::memory_order_relaxed) != 0; }

enum class SpanScope { thread, process };
// As long as it lives, spans of this thread, or of all threads without a sink of their own, go to the sink.
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
  std::shared_ptr<SpanSink> sink_;  // it may be the last that holds it
};

}  // namespace lockstep::detail

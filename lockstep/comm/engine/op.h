// Op: one rank's share of an operation, as Lockstep's own engines take it. Does not use LibTorch.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/base/awake_clock.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/call.h>

namespace lockstep::detail {

constexpr int kAnySource = -1;

// A rank found an error in its own call and joined its peers with only that error: every rank gets the same
// text. Nothing has been written, and the engine continues with the next operation.
class Refused : public KindedError {
 public:
  explicit Refused(const std::string& text) : KindedError(CommError::Kind::stopped, text) {}
};

// One rank's share of an operation. Buffers are dense and live until `done` has been called.
//   all_reduce, reduce, broadcast: outputs[0], in place
//   all_gather: inputs[0], outputs[from each rank]   gather: inputs[0], on the root outputs[from each]
//   scatter: outputs[0], on the root inputs[to each]  reduce_scatter: inputs[to each], outputs[0]
//   all_to_all: inputs[to each], outputs[from each]   send: inputs[0]   recv: outputs[0]
struct Op {
  Call call;
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  std::size_t item_size = 0;  // bytes per element
  // For a device's memory, in the engine's own form: when it may be used, and when the engine is done with
  // it.
  std::shared_ptr<void> order = {};
  // Reason for a refusal; only the call is set then. Only for collectives in shared memory.
  std::string refusal = {};
  // for a receive in shared memory: a shorter message fills the first part of the buffer
  bool takes_less = false;
  // Called exactly once, by any thread, without holding a lock of the engine. source is set for a receive.
  std::function<void(std::exception_ptr error, int source)> done;
};

// An Op while an engine works on it.
struct OpItem {
  Op op;
  AwakeClock::time_point posted{}, deadline{};  // set by the poster
  void start(std::chrono::nanoseconds timeout) {
    posted = AwakeClock::now();
    deadline = posted + timeout;
  }
  bool begun = false, settled = false;  // under the engine's mutex

  virtual ~OpItem() = default;
  // Called exactly once, by any thread, without holding a lock of the engine.
  virtual void done(const std::exception_ptr& error, int source) = 0;
};

// Runs collectives one at a time, in order, on the calling thread. An OpQueue (transports/shm) orders them.
class CollectiveEngine {
 public:
  virtual ~CollectiveEngine() = default;
  // Called by one thread at a time, begin and finish alternately. begin does not wait; its data lets peers
  // proceed.
  virtual void begin(Op& op) = 0;
  virtual void finish(Op& op, AwakeClock::time_point deadline) = 0;
  // An operation failed and peers may still be in it. Memory that they may read or write is not reused.
  virtual void give_up() noexcept = 0;
  // Ends finish with this cause, now and later. Thread-safe.
  virtual void interrupt(const std::string& cause) = 0;
  // Names the ranks that delay their peers: "rank 1 has not arrived". Thread-safe.
  virtual std::string absent() const = 0;
  // True if a peer has reached an operation that this rank has not begun. Call it only while none is in
  // progress here.
  virtual bool is_awaited() const { return false; }
};

// Interface to Lockstep's own engines without c10d in between: c10d's objects cost more than a small
// operation.
class OpSink {
 public:
  virtual ~OpSink() = default;
  // Never blocks. soon: the caller will not wait for it at once.
  virtual void post(std::shared_ptr<OpItem> item, bool soon) = 0;
  // Returns when item.done has been called or is about to be. When the deadline passes, everything in the
  // engine fails.
  virtual void wait(OpItem& item, AwakeClock::time_point deadline) = 0;
};

// Counts the threads that are calling done or destroying it. An interpreter must not shut down while there is
// one, because the callback may need it.
class Settling {
 public:
  Settling() { count_.fetch_add(1); }
  ~Settling() { count_.fetch_sub(1); }
  Settling(const Settling&) = delete;
  Settling& operator=(const Settling&) = delete;
  static int count() { return count_.load(); }

 private:
  static inline std::atomic<int> count_ = 0;
};

}  // namespace lockstep::detail

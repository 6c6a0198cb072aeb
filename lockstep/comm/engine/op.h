// One rank's share of an operation, as the engines of our own take it. No LibTorch.
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

// A rank found its own call wrong and came to the others with nothing but that: the same text on every rank.
// Nothing has been written, and the engine goes on with the next operation.
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
  std::size_t item_size = 0;  // bytes an element
  // Of a device's memory: when it may be used and when that has ended, as its engine has it.
  std::shared_ptr<void> order = {};
  // Instead of everything but the call: why this rank refuses it. Of collectives in shared memory only.
  std::string refusal = {};
  bool takes_less = false;  // of a receive in shared memory: a shorter message fills the first part
  // Called exactly once, by any thread, without a lock of the engine's; source is set for a receive.
  std::function<void(std::exception_ptr error, int source)> done;
};

// A part while an engine works on it.
struct OpItem {
  Op op;
  AwakeClock::time_point posted{}, deadline{};  // whoever posts it says
  void start(std::chrono::nanoseconds timeout) {
    posted = AwakeClock::now();
    deadline = posted + timeout;
  }
  bool begun = false, settled = false;  // under the engine's mutex

  virtual ~OpItem() = default;
  // Called exactly once, by any thread, without a lock of the engine's.
  virtual void done(const std::exception_ptr& error, int source) = 0;
};

// Collectives, one at a time and in order, on the thread of whoever calls; a lane (transports/shm) orders
// them.
class CollectiveEngine {
 public:
  virtual ~CollectiveEngine() = default;
  // One thread at a time, begin and finish in turn. begin does not wait: peers may go on with what it says.
  virtual void begin(Op& op) = 0;
  virtual void finish(Op& op, AwakeClock::time_point deadline) = 0;
  // An operation failed: peers may still be in it. What they may read or write is not used again.
  virtual void give_up() noexcept = 0;
  // Any thread: whoever is in finish comes out of it with this cause, now and later.
  virtual void interrupt(const std::string& cause) = 0;
  // "rank 1 has not come": who keeps the others waiting. Any thread.
  virtual std::string absent() const = 0;
  // A peer has come to an operation that this rank has not begun. While none is under way here.
  virtual bool is_awaited() const { return false; }
};

// An engine of our own, without c10d between: c10d's objects cost more than a small operation does.
class OpSink {
 public:
  virtual ~OpSink() = default;
  // Never waits. soon: nobody is going to wait for it in a moment.
  virtual void post(std::shared_ptr<OpItem> item, bool soon) = 0;
  // Returns when item.done has been called or is about to be. After the deadline everything in the engine
  // fails.
  virtual void wait(OpItem& item, AwakeClock::time_point deadline) = 0;
};

// A thread that calls done, or lets go of it. An interpreter must not end while there is one: what is called
// may want it.
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

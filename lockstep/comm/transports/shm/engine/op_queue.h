// OpQueue: the operations of a group, one after another. A thread that waits for an operation executes it,
// and those before it, itself, without a handover. The queue's thread executes operations that no thread
// waits for. If a callback at the end of an operation blocks that thread, a deputy takes its place, and
// another one the deputy's.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include <lockstep/base/crew.h>
#include <lockstep/comm/engine/op.h>
#include <lockstep/comm/transports/shm/engine/barrier.h>

namespace lockstep::shm {

class OpQueue : public detail::OpSink, public std::enable_shared_from_this<OpQueue> {
 public:
  using Item = detail::OpItem;

  // keep: objects that must outlive the engine.
  OpQueue(std::unique_ptr<detail::CollectiveEngine> engine, std::shared_ptr<void> keep);
  ~OpQueue() override;

  void post(std::shared_ptr<Item> item, bool soon) override;
  void wait(Item& item, Clock::time_point deadline) override;
  // Fails every operation with this cause, now and later. Thread-safe.
  void interrupt(const std::string& cause);
  // Waits until everything posted has completed or failed.
  void drain();
  bool is_awaited();  // a peer waits for an operation that this rank has not posted
  bool is_idle();     // no operation is in progress; callbacks may still run
  // Nothing may be posted afterwards. Does not wait for operations in progress.
  void close();
  // After close(): waits until its threads have released it. Returns false at the limit.
  bool wait_for_threads(std::chrono::milliseconds limit) const { return crew_.wait(limit); }
  std::string absent() const { return engine_->absent(); }

 private:
  using Lock = std::unique_lock<std::mutex>;
  void drive(Lock& lock, Clock::time_point deadline);
  void begin(Item& item);
  void settle(Lock& lock, std::shared_ptr<Item> item, const std::exception_ptr& error);
  void fail_queued(Lock& lock);
  void progress();
  void call_deputy();
  void stand_in();

  const std::shared_ptr<void> keep_;
  const std::unique_ptr<detail::CollectiveEngine> engine_;
  std::mutex mutex_;
  std::condition_variable settled_, posted_, away_long_;
  std::deque<std::shared_ptr<Item>> queue_;
  // set after a failure, unless it was a refusal: no operation can succeed any more
  std::exception_ptr broken_;
  std::exception_ptr stopped_;  // set by interrupt(): no operation after the current one can succeed
  int waiting_ = 0;
  bool busy_ = false, asleep_ = false, soon_ = false, closed_ = false, has_thread_ = false;
  detail::Crew crew_;
  std::thread::id thread_, deputy_;  // of the queue
  bool away_ = false;                // True while the thread is in a user's callback
  bool has_deputy_ = false, deputy_called_ = false;
  Clock::time_point last_post_{};
  std::chrono::microseconds nap_{250};  // of the thread
};

}  // namespace lockstep::shm

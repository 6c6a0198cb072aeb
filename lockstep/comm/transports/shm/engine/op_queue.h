// The operations of a group, one after another. Whoever waits for one does the work, and that of those before
// it, on its own thread: nothing is handed over. What nobody waits for is done by a thread of the lane; when
// that is kept by what it calls at the end of an operation, a deputy takes its place, and another the
// deputy's.
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

  // keep: what the engine needs as long as it lives.
  OpQueue(std::unique_ptr<detail::CollectiveEngine> engine, std::shared_ptr<void> keep);
  ~OpQueue() override;

  void post(std::shared_ptr<Item> item, bool soon) override;
  void wait(Item& item, Clock::time_point deadline) override;
  // Every operation ends with this cause, now and later. Any thread.
  void interrupt(const std::string& cause);
  // Until all that was posted is done, or has failed.
  void drain();
  bool is_awaited();  // a peer waits for an operation that this rank has not posted
  bool is_idle();     // nothing is under way, but perhaps what is called at the end of it
  // No more is posted. What is under way is not waited for.
  void close();
  // Then: until its threads have let go of it. False at the limit.
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
  std::exception_ptr broken_;   // no operation can succeed after one has failed, unless it was refused
  std::exception_ptr stopped_;  // none after the one that is under way
  int waiting_ = 0;
  bool busy_ = false, asleep_ = false, soon_ = false, closed_ = false, has_thread_ = false;
  detail::Crew crew_;
  std::thread::id thread_, deputy_;  // the lane's
  bool away_ = false;                // the thread is in somebody's callback
  bool has_deputy_ = false, deputy_called_ = false;
  Clock::time_point last_post_{};
  std::chrono::microseconds nap_{250};  // of the thread
};

}  // namespace lockstep::shm

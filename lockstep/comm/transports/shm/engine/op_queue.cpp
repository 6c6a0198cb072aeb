#include <lockstep/comm/transports/shm/engine/op_queue.h>

#include <algorithm>
#include <thread>

namespace lockstep::shm {
namespace {

// How long an operation may lie before the queue's thread handles it; most are waited for at once. As long as
// all of them are, the thread polls less and less often: each poll takes a processor from computing threads
// (a step of a small model is a third slower with naps of 250 us).
constexpr std::chrono::microseconds kLaneNap(250), kLongLaneNap(4000);
// Operations that take longer than waking the thread are handed to it, and so are several at once.
constexpr std::int64_t kLarge = 256 << 10;
// How long after the last operation the thread keeps polling: posting need not wake it then.
constexpr std::chrono::milliseconds kLaneLinger(10);
// How long the thread may be away before its deputy takes over.
constexpr std::chrono::milliseconds kAway(2);

}  // namespace

OpQueue::OpQueue(std::unique_ptr<detail::CollectiveEngine> engine, std::shared_ptr<void> keep)
    : keep_(std::move(keep)), engine_(std::move(engine)) {}

OpQueue::~OpQueue() = default;

void OpQueue::post(std::shared_ptr<Item> item, bool soon) {
  Lock lock(mutex_);
  last_post_ = item->posted;
  // Publishes this rank's data for its peers now, whenever this rank looks again.
  if (queue_.empty() && !busy_ && !broken_) begin(*item);
  if (broken_) {
    settle(lock, std::move(item), broken_);
    return;
  }
  queue_.push_back(std::move(item));
  soon_ = soon_ || soon;
  if (!has_thread_) {
    // Without a thread, the waiters do the work.
    has_thread_ = crew_.start([self = shared_from_this()] { self->progress(); });
  } else if (away_) {
    call_deputy();
  } else if (asleep_ || soon ||
             (nap_ > kLaneNap && (queue_.size() > 1 || queue_.back()->op.call.bytes >= kLarge))) {
    nap_ = kLaneNap;
    posted_.notify_one();
  }
}

void OpQueue::begin(Item& item) {
  try {
    engine_->begin(item.op);
    item.begun = true;
  } catch (...) {
    broken_ = std::current_exception();
    engine_->give_up();
  }
}

void OpQueue::drive(Lock& lock, Clock::time_point deadline) {
  auto item = std::move(queue_.front());
  queue_.pop_front();
  busy_ = true;
  if (!item->begun && !broken_) begin(*item);
  auto error = broken_;
  bool refused = false;
  lock.unlock();
  if (!error) {
    try {
      engine_->finish(item->op, std::min(deadline, item->deadline));
    } catch (const detail::Refused&) {
      error = std::current_exception();
      refused = true;
    } catch (...) {
      error = std::current_exception();
    }
  }
  lock.lock();
  if (!broken_ && ((error && !refused) || stopped_)) {
    broken_ = error && !refused ? error : stopped_;
    engine_->give_up();
  }
  busy_ = false;
  settle(lock, std::move(item), error);
  if (broken_) fail_queued(lock);
}

// Releases the lock meanwhile: the callback may post again, and wait. The item may hold the last reference to
// its group, and so to this queue's owner.
void OpQueue::settle(Lock& lock, std::shared_ptr<Item> item, const std::exception_ptr& error) {
  item->settled = true;
  if (waiting_ > 0) settled_.notify_all();
  const detail::Settling here;
  const auto here_is = std::this_thread::get_id();
  const bool is_ours = here_is == thread_;
  if (is_ours) away_ = true;
  if (here_is == deputy_) {
    deputy_ = {};
    has_deputy_ = deputy_called_ = false;
  }
  if (away_ && !queue_.empty()) call_deputy();
  lock.unlock();
  item->done(error, -1);
  item.reset();
  lock.lock();
  if (is_ours) away_ = false;
}

void OpQueue::fail_queued(Lock& lock) {
  while (!queue_.empty()) {
    auto item = std::move(queue_.front());
    queue_.pop_front();
    settle(lock, std::move(item), broken_);
  }
}

void OpQueue::wait(Item& item, Clock::time_point deadline) {
  Lock lock(mutex_);
  while (!item.settled) {
    if (!busy_ && !queue_.empty()) {
      drive(lock, deadline);
      continue;
    }
    ++waiting_;
    const auto status = settled_.wait_until(lock, deadline);
    --waiting_;
    if (status == std::cv_status::timeout && !item.settled && Clock::now() >= deadline) {
      engine_->interrupt("another operation did not complete within its deadline");
      deadline = Clock::now() + std::chrono::hours(1);
    }
  }
}

void OpQueue::interrupt(const std::string& cause) {
  engine_->interrupt(cause);
  Lock lock(mutex_);
  if (broken_) return;
  if (!stopped_) stopped_ = std::make_exception_ptr(Interrupted(cause));
  if (busy_) return;  // a thread in the engine returns from it now
  broken_ = stopped_;
  engine_->give_up();
  fail_queued(lock);
}

void OpQueue::drain() {
  Lock lock(mutex_);
  while (busy_ || !queue_.empty()) {
    if (!busy_) {
      drive(lock, queue_.front()->deadline);
      continue;
    }
    ++waiting_;
    settled_.wait(lock);
    --waiting_;
  }
}

bool OpQueue::is_idle() {
  Lock lock(mutex_);
  return !busy_ && queue_.empty();
}

bool OpQueue::is_awaited() {
  Lock lock(mutex_);
  return !busy_ && queue_.empty() && !broken_ && engine_->is_awaited();
}

void OpQueue::close() {
  constexpr const char* kLeft = "this rank has left the group";
  Lock lock(mutex_);
  if (busy_ || !queue_.empty()) {
    lock.unlock();
    interrupt(kLeft);
    lock.lock();
  } else if (!broken_) {
    broken_ = std::make_exception_ptr(Interrupted(kLeft));
    engine_->give_up();
  }
  closed_ = true;
  posted_.notify_one();
  away_long_.notify_one();
}

void OpQueue::call_deputy() {
  if (deputy_called_) return;
  deputy_called_ = true;
  if (has_deputy_) return away_long_.notify_one();
  has_deputy_ = crew_.start([self = shared_from_this()] { self->stand_in(); });
  deputy_called_ = has_deputy_;
}

void OpQueue::stand_in() {
  Lock lock(mutex_);
  const auto self = deputy_ = std::this_thread::get_id();
  while (!closed_) {
    away_long_.wait(lock, [&] { return deputy_called_ || closed_; });
    away_long_.wait_for(lock, kAway, [&] { return closed_; });
    while (away_ && !closed_ && !queue_.empty()) {
      if (!busy_)
        drive(lock, queue_.front()->deadline);
      else
        away_long_.wait_for(lock, kAway);
      if (deputy_ != self) return;  // it was blocked itself and has been replaced
    }
    deputy_called_ = false;
  }
}

void OpQueue::progress() {
  Lock lock(mutex_);
  thread_ = std::this_thread::get_id();
  while (!closed_) {
    if (queue_.empty() && Clock::now() - last_post_ >= kLaneLinger) {
      asleep_ = true;
      posted_.wait(lock, [&] { return !queue_.empty() || closed_; });
      asleep_ = false;
    }
    if (!queue_.empty() && !busy_ && (soon_ || Clock::now() - queue_.front()->posted >= kLaneNap)) {
      drive(lock, queue_.front()->deadline);
      soon_ = soon_ && !queue_.empty();
      nap_ = kLaneNap;
    } else if (!closed_) {
      // It is not known yet whether a thread will wait for the operations queued now.
      const bool left = !queue_.empty() && !busy_;
      if (posted_.wait_for(lock, left ? kLaneNap : nap_) == std::cv_status::timeout && !left)
        nap_ = std::min(2 * nap_, kLongLaneNap);
    }
  }
}

}  // namespace lockstep::shm

#include <lockstep/data/core/workers.h>

#include <pthread.h>

#include <utility>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/base/quiet_threads.h>

namespace lockstep::detail {

Workers::Workers(Options options)
    : options_(std::move(options)),
      at_(static_cast<std::size_t>(options_.threads)),
      done_(options_.slots),
      errors_(options_.slots) {
  for (auto& each : at_) each = -1;
  QuietThreads quiet;
  try {
    for (int worker = 0; worker < options_.threads; ++worker) {
      threads_.emplace_back([this, worker] { run(worker); });
      const std::lock_guard lock(mutex_);
      ++running_;
    }
  } catch (...) {  // the system is out of threads; join those that did start
    stop();
    throw;
  }
}

Workers::~Workers() { stop(); }

void Workers::stop() {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  queue_.clear();
  changed_for_workers_.notify_all();
  if (!changed_for_waiter_.wait_for(lock, std::chrono::seconds(10), [&] { return running_ <= 0; }))
    log(LogLevel::warn, "DataLoader: the iterator has ended and waits for its workers: {}", whereabouts());
  lock.unlock();
  for (auto& thread : threads_) thread.join();
}

void Workers::put(std::size_t slot) {
  {
    const std::lock_guard lock(mutex_);
    LOCKSTEP_ASSERT(slot < options_.slots, "slot out of range");
    done_[slot] = false;
    errors_[slot] = nullptr;
    queue_.push_back(slot);
  }
  changed_for_workers_.notify_one();
}

bool Workers::wait(std::size_t slot, std::optional<std::chrono::milliseconds> timeout) {
  std::exception_ptr error;
  {
    std::unique_lock lock(mutex_);
    const auto done = [&] { return done_[slot] != 0; };
    if (!timeout)
      changed_for_waiter_.wait(lock, done);
    else if (!changed_for_waiter_.wait_for(lock, *timeout, done))
      return false;
    error = std::exchange(errors_[slot], nullptr);
  }
  if (error) std::rethrow_exception(error);
  return true;
}

void Workers::run(int worker) {
  ::pthread_setname_np(::pthread_self(), "ls_data");
  std::exception_ptr no_begin;
  try {
    if (options_.begin) options_.begin(worker);
  } catch (...) {
    no_begin = std::current_exception();
  }
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_for_workers_.wait(lock, [&] { return stopping() || !queue_.empty(); });
    if (stopping()) break;
    const auto slot = queue_.front();
    queue_.pop_front();
    lock.unlock();
    std::exception_ptr error = no_begin;
    if (!error) try {
        options_.work(*this, worker, slot);
      } catch (...) {
        error = std::current_exception();
      }
    at(worker, -1);
    lock.lock();
    errors_[slot] = std::exchange(error, nullptr);
    done_[slot] = true;
    changed_for_waiter_.notify_one();
  }
  --running_;
  changed_for_waiter_.notify_one();
}

std::string Workers::whereabouts() const {
  std::string text;
  for (std::size_t worker = 0; worker < at_.size(); ++worker) {
    const auto index = at_[worker].load(std::memory_order_relaxed);
    text += (text.empty() ? "worker " : ", worker ") + std::to_string(worker) +
            (index < 0 ? " is idle" : " is at index " + std::to_string(index));
  }
  return text;
}

}  // namespace lockstep::detail

#include <lockstep/base/crew.h>

#include <unistd.h>

#include <condition_variable>
#include <list>
#include <mutex>
#include <system_error>
#include <thread>

#include <lockstep/base/quiet_threads.h>

namespace lockstep::detail {

struct Crew::State {
  using Threads = std::list<std::thread>;

  std::mutex mutex;
  std::condition_variable over;
  Threads running, done;    // done: their bodies have been destroyed.
  std::size_t joining = 0;  // Number of finished threads being joined.
  const ::pid_t process = ::getpid();

  // A forked child has none of the threads, and nothing to join.
  bool in_child() const { return process != ::getpid(); }

  // Each running thread holds a reference, so only finished threads are left, possibly including this one.
  ~State() {
    if (in_child()) {
      new Threads(std::move(done));
      return;
    }
    for (auto& thread : done) thread.detach();
  }

  void run(std::function<void()>& body, Threads::iterator self) {
    body();
    body = nullptr;
    std::lock_guard lock(mutex);
    done.splice(done.end(), running, self);
    over.notify_all();
  }

  // Releases the lock meanwhile, because a thread's last steps are outside this class's control.
  void join_done(std::unique_lock<std::mutex>& lock) {
    if (done.empty() || in_child()) return;
    Threads mine;
    mine.swap(done);
    joining += mine.size();
    lock.unlock();
    for (auto& thread : mine) thread.join();
    lock.lock();
    joining -= mine.size();
    over.notify_all();
  }
};

Crew::Crew() : state_(std::make_shared<State>()) {}

bool Crew::start(std::function<void()> body) {
  std::unique_lock lock(state_->mutex);
  state_->join_done(lock);
  const auto self = state_->running.emplace(state_->running.end());
  const QuietThreads quiet;
  try {
    *self = std::thread([state = state_, body = std::move(body), self]() mutable { state->run(body, self); });
  } catch (const std::system_error&) {
    state_->running.erase(self);
    return false;
  } catch (...) {
    state_->running.erase(self);
    throw;
  }
  return true;
}

bool Crew::wait(std::chrono::milliseconds limit) const {
  if (state_->in_child()) return true;
  std::unique_lock lock(state_->mutex);
  std::size_t own = 0;
  for (const auto& thread : state_->running) own += thread.get_id() == std::this_thread::get_id() ? 1 : 0;
  const auto end = std::chrono::steady_clock::now() + limit;
  const bool all = state_->over.wait_until(lock, end, [&] { return state_->running.size() <= own; });
  state_->join_done(lock);
  // Threads that another caller is joining have not ended either.
  return state_->over.wait_until(lock, end, [&] { return state_->joining == 0; }) && all;
}

}  // namespace lockstep::detail

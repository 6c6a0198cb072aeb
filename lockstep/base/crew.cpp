#include <lockstep/base/crew.h>

#include <condition_variable>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>

#include <lockstep/base/quiet_threads.h>

namespace lockstep::detail {

struct Crew::State {
  std::mutex mutex;
  std::condition_variable ended;
  std::size_t running = 0;
  std::set<std::thread::id> threads;  // of those that have begun

  void run(std::function<void()>& body) {
    const auto here = std::this_thread::get_id();
    {
      std::lock_guard lock(mutex);
      threads.insert(here);
    }
    body();
    body = nullptr;
    std::lock_guard lock(mutex);
    threads.erase(here);
    --running;
    ended.notify_all();
  }
};

Crew::Crew() : state_(std::make_shared<State>()) {}

bool Crew::start(std::function<void()> body) {
  std::lock_guard lock(state_->mutex);
  const QuietThreads quiet;
  try {
    std::thread([state = state_, body = std::move(body)]() mutable { state->run(body); }).detach();
  } catch (const std::system_error&) {
    return false;
  }
  ++state_->running;
  return true;
}

bool Crew::wait(std::chrono::milliseconds limit) const {
  std::unique_lock lock(state_->mutex);
  const std::size_t own = state_->threads.contains(std::this_thread::get_id()) ? 1 : 0;
  return state_->ended.wait_for(lock, limit, [&] { return state_->running == own; });
}

}  // namespace lockstep::detail

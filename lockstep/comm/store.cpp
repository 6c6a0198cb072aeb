#include <lockstep/comm/store.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <future>
#include <mutex>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>

namespace lockstep::detail {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Works through calls in order. Where one never returns, the thread is left behind with what it holds.
class WatchedStore::Clerk {
 public:
  Clerk() {
    std::thread([desk = desk_] {
      for (;;) {
        std::function<void()> job;
        {
          std::unique_lock lock(desk->mutex);
          desk->wake.wait(lock, [&] { return desk->closed || !desk->jobs.empty(); });
          if (desk->jobs.empty()) return;
          job = std::move(desk->jobs.front());
          desk->jobs.pop_front();
        }
        job();
      }
    }).detach();
  }
  ~Clerk() {
    std::lock_guard lock(desk_->mutex);
    desk_->closed = true;
    desk_->wake.notify_one();
  }
  Clerk(const Clerk&) = delete;
  Clerk& operator=(const Clerk&) = delete;

  void take(std::function<void()> job) {
    std::lock_guard lock(desk_->mutex);
    desk_->jobs.push_back(std::move(job));
    desk_->wake.notify_one();
  }

 private:
  struct Desk {
    std::mutex mutex;
    std::condition_variable wake;
    std::deque<std::function<void()>> jobs;
    bool closed = false;
  };
  const std::shared_ptr<Desk> desk_ = std::make_shared<Desk>();
};

WatchedStore::WatchedStore(c10::intrusive_ptr<c10d::Store> inner, milliseconds timeout,
                           std::function<void()> check)
    : WatchedStore(std::move(inner), timeout, std::move(check), std::make_shared<Clerk>()) {}

WatchedStore::WatchedStore(c10::intrusive_ptr<c10d::Store> inner, milliseconds timeout,
                           std::function<void()> check, std::shared_ptr<Clerk> clerk)
    : Store(timeout), inner_(std::move(inner)), check_(std::move(check)), clerk_(std::move(clerk)) {}

// f must hold all it uses by value: it may outlive this call.
template <typename F>
auto WatchedStore::ask(F f) -> decltype(f()) {
  auto task = std::make_shared<std::packaged_task<decltype(f())()>>(std::move(f));
  auto answer = task->get_future();
  clerk_->take([task] { (*task)(); });
  const auto deadline = Clock::now() + timeout_;
  while (answer.wait_for(milliseconds(50)) != std::future_status::ready) {
    check_();
    if (Clock::now() >= deadline)
      throw Error(fmt::format(
          "the store has not answered within {:.1f} s: rank 0 serves it, and is stopped or out of reach",
          std::chrono::duration<double>(timeout_).count()));
  }
  return answer.get();
}

void WatchedStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  // kNoTimeout and kDefaultTimeout are c10d's words for "I don't mind": our own limit then.
  const auto limit = timeout <= milliseconds(0) || timeout == kDefaultTimeout ? timeout_ : timeout;
  const auto deadline = Clock::now() + limit;
  // Asked for again and again, because a wait of c10d's own warns when it is cut short.
  for (milliseconds pause(1); !check(keys); pause = std::min(2 * pause, milliseconds(50))) {
    check_();
    if (Clock::now() >= deadline)
      // c10d's users look for " timeout " with its spaces.
      throw Error(fmt::format("a wait in the store hit its timeout after {:.1f} s for: {}",
                              std::chrono::duration<double>(limit).count(), fmt::join(keys, ", ")));
    std::this_thread::sleep_for(pause);
  }
}

void WatchedStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

std::vector<uint8_t> WatchedStore::get(const std::string& key) {
  wait({key});
  return ask([store = inner_, key] { return store->get(key); });
}

std::vector<std::vector<uint8_t>> WatchedStore::multiGet(const std::vector<std::string>& keys) {
  wait(keys);
  return ask([store = inner_, keys] { return store->multiGet(keys); });
}

c10::intrusive_ptr<c10d::Store> WatchedStore::clone() {
  return c10::make_intrusive<WatchedStore>(inner_->clone(), timeout_, check_);
}
void WatchedStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  ask([store = inner_, key, value] { store->set(key, value); });
}
std::vector<uint8_t> WatchedStore::compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                              const std::vector<uint8_t>& desired) {
  return ask([store = inner_, key, expected, desired] { return store->compareSet(key, expected, desired); });
}
int64_t WatchedStore::add(const std::string& key, int64_t value) {
  return ask([store = inner_, key, value] { return store->add(key, value); });
}
bool WatchedStore::deleteKey(const std::string& key) {
  return ask([store = inner_, key] { return store->deleteKey(key); });
}
bool WatchedStore::check(const std::vector<std::string>& keys) {
  return ask([store = inner_, keys] { return store->check(keys); });
}
int64_t WatchedStore::getNumKeys() {
  return ask([store = inner_] { return store->getNumKeys(); });
}
void WatchedStore::append(const std::string& key, const std::vector<uint8_t>& value) {
  ask([store = inner_, key, value] { store->append(key, value); });
}
void WatchedStore::multiSet(const std::vector<std::string>& keys,
                            const std::vector<std::vector<uint8_t>>& values) {
  ask([store = inner_, keys, values] { store->multiSet(keys, values); });
}
bool WatchedStore::hasExtendedApi() const { return inner_->hasExtendedApi(); }

void put(c10d::Store& store, const std::string& key, const std::string& value) {
  store.set(key, std::vector<uint8_t>(value.begin(), value.end()));
}

std::string take(c10d::Store& store, const std::string& key) {
  auto bytes = store.get(key);
  return {bytes.begin(), bytes.end()};
}

}  // namespace lockstep::detail

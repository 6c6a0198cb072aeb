#include <lockstep/comm/store.h>

#include <algorithm>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>

namespace lockstep::detail {

using std::chrono::milliseconds;

WatchedStore::WatchedStore(c10::intrusive_ptr<c10d::Store> inner, milliseconds timeout,
                           std::function<void()> check)
    : Store(timeout), inner_(std::move(inner)), check_(std::move(check)) {}

void WatchedStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  using Clock = std::chrono::steady_clock;
  // kNoTimeout and kDefaultTimeout are c10d's words for "I don't mind": our own limit then.
  const auto limit = timeout <= milliseconds(0) || timeout == kDefaultTimeout ? timeout_ : timeout;
  const auto deadline = Clock::now() + limit;
  // Asked for again and again, because a wait of c10d's own cannot be woken, and warns when it is cut short.
  for (milliseconds pause(1); !inner_->check(keys); pause = std::min(2 * pause, milliseconds(50))) {
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
  return inner_->get(key);
}

std::vector<std::vector<uint8_t>> WatchedStore::multiGet(const std::vector<std::string>& keys) {
  wait(keys);
  return inner_->multiGet(keys);
}

c10::intrusive_ptr<c10d::Store> WatchedStore::clone() {
  return c10::make_intrusive<WatchedStore>(inner_->clone(), timeout_, check_);
}
void WatchedStore::set(const std::string& key, const std::vector<uint8_t>& value) { inner_->set(key, value); }
std::vector<uint8_t> WatchedStore::compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                              const std::vector<uint8_t>& desired) {
  return inner_->compareSet(key, expected, desired);
}
int64_t WatchedStore::add(const std::string& key, int64_t value) { return inner_->add(key, value); }
bool WatchedStore::deleteKey(const std::string& key) { return inner_->deleteKey(key); }
bool WatchedStore::check(const std::vector<std::string>& keys) { return inner_->check(keys); }
int64_t WatchedStore::getNumKeys() { return inner_->getNumKeys(); }
void WatchedStore::append(const std::string& key, const std::vector<uint8_t>& value) {
  inner_->append(key, value);
}
void WatchedStore::multiSet(const std::vector<std::string>& keys,
                            const std::vector<std::vector<uint8_t>>& values) {
  inner_->multiSet(keys, values);
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

#include <lockstep/comm/c10d/store.h>

#include <lockstep/base/error.h>

namespace lockstep::detail {

using control::StoreCall;
using control::StoreReply;
using std::chrono::milliseconds;

namespace {

std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

}  // namespace

JobStore::JobStore(std::shared_ptr<control::Channel> channel, std::string prefix, milliseconds timeout,
                   std::function<std::string()> failed)
    : Store(timeout), channel_(std::move(channel)), prefix_(std::move(prefix)), failed_(std::move(failed)) {}

StoreReply JobStore::ask(StoreCall call, const std::vector<std::string>& keys,
                         std::vector<std::string> values, int64_t number, milliseconds timeout) {
  control::StoreRequest request{.call = call, .keys = {}, .values = std::move(values), .number = number};
  for (const auto& key : keys) request.keys.push_back(prefix_ + key);
  if (timeout == kNoTimeout) timeout = std::chrono::hours(24 * 365);
  try {
    return channel_->ask(request, control::Clock::now() + timeout, [&] { return !failed_().empty(); });
  } catch (const Error&) {
    // The reason of the verdict is more useful than the error that there is one.
    if (auto why = failed_(); !why.empty()) throw Error(why);
    throw;
  }
}

StoreReply JobStore::ask(StoreCall call, const std::vector<std::string>& keys,
                         std::vector<std::string> values, int64_t number) {
  return ask(call, keys, std::move(values), number, timeout_);
}

c10::intrusive_ptr<c10d::Store> JobStore::clone() {
  return c10::make_intrusive<JobStore>(channel_, prefix_, timeout_, failed_);
}
void JobStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  ask(StoreCall::set, {key}, {text_of(value)});
}
std::vector<uint8_t> JobStore::compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                          const std::vector<uint8_t>& desired) {
  return bytes_of(ask(StoreCall::compare_set, {key}, {text_of(expected), text_of(desired)}).values.at(0));
}
std::vector<uint8_t> JobStore::get(const std::string& key) {
  return bytes_of(ask(StoreCall::get, {key}).values.at(0));
}
int64_t JobStore::add(const std::string& key, int64_t value) {
  return ask(StoreCall::add, {key}, {}, value).number;
}
bool JobStore::deleteKey(const std::string& key) { return ask(StoreCall::erase, {key}).number != 0; }
bool JobStore::check(const std::vector<std::string>& keys) { return ask(StoreCall::check, keys).number != 0; }
int64_t JobStore::getNumKeys() { return ask(StoreCall::count, {}).number; }
void JobStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }
void JobStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  ask(StoreCall::wait, keys, {}, 0, timeout);
}
void JobStore::append(const std::string& key, const std::vector<uint8_t>& value) {
  ask(StoreCall::append, {key}, {text_of(value)});
}
std::vector<std::vector<uint8_t>> JobStore::multiGet(const std::vector<std::string>& keys) {
  std::vector<std::vector<uint8_t>> values;
  for (const auto& value : ask(StoreCall::get, keys).values) values.push_back(bytes_of(value));
  return values;
}
void JobStore::multiSet(const std::vector<std::string>& keys,
                        const std::vector<std::vector<uint8_t>>& values) {
  std::vector<std::string> texts;
  for (const auto& value : values) texts.push_back(text_of(value));
  ask(StoreCall::multi_set, keys, std::move(texts));
}

void put(c10d::Store& store, const std::string& key, const std::string& value) {
  store.set(key, bytes_of(value));
}

std::string take(c10d::Store& store, const std::string& key) { return text_of(store.get(key)); }

}  // namespace lockstep::detail

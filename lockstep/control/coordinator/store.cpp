#include <lockstep/control/coordinator/store.h>

#include <charconv>
#include <limits>
#include <optional>
#include <system_error>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace lockstep::control {
namespace {

constexpr std::size_t kMostKey = 4096, kMostKeys = 1 << 16;
constexpr std::size_t kMostBytes = std::size_t{256} << 20;  // Limit for all keys and values together.
constexpr std::size_t kMostReply = kMostPayload - 4096;     // Limit for the values in one answer.

void write_list(Writer& out, const std::vector<std::string>& list) {
  out.number(static_cast<std::int64_t>(list.size()));
  for (const auto& each : list) out.text(each);
}

std::vector<std::string> read_list(Reader& in, std::size_t most_length) {
  std::vector<std::string> list;
  // Not reserved: the count comes from the peer and may be wrong.
  for (auto left = in.number(0, kMostKeys); left > 0; --left) list.push_back(in.text(most_length));
  return list;
}

}  // namespace

void StoreRequest::check() const {
  std::size_t bytes = 0;
  for (const auto& key : keys) {
    bytes += sizeof(std::uint32_t) + key.size();
    if (key.size() > kMostKey)
      throw Error(fmt::format("store: expected a key of at most {} bytes, got {} ({}...)", kMostKey,
                              key.size(), key.substr(0, 64)));
  }
  for (const auto& value : values) bytes += sizeof(std::uint32_t) + value.size();
  if (keys.size() > kMostKeys)
    throw Error(fmt::format("store: expected at most {} keys in a request, got {}", kMostKeys, keys.size()));
  if (bytes > kMostReply)
    throw Error(fmt::format("store: expected a request of at most {} bytes, got {}", kMostReply, bytes));
}

std::string StoreRequest::encode() const {
  Writer out;
  out.number(static_cast<int>(call));
  write_list(out, keys);
  write_list(out, values);
  out.number(number);
  return out.take();
}

StoreRequest StoreRequest::decode(std::string_view payload) {
  Reader in(payload);
  StoreRequest request;
  request.call = static_cast<StoreCall>(in.number(0, static_cast<int>(StoreCall::forget)));
  request.keys = read_list(in, kMostKey);
  request.values = read_list(in, kMostPayload);
  request.number = in.number();
  in.end();
  const auto keys = request.keys.size(), values = request.values.size();
  const bool fits = [&] {
    switch (request.call) {
      case StoreCall::set:
      case StoreCall::append: return keys == 1 && values == 1;
      case StoreCall::compare_set: return keys == 1 && values == 2;
      case StoreCall::add:
      case StoreCall::erase: return keys == 1 && values == 0;
      case StoreCall::get:
      case StoreCall::wait:
      case StoreCall::check: return values == 0;
      case StoreCall::forget:
      case StoreCall::count: return keys == 0 && values == 0;
      case StoreCall::multi_set: return keys == values;
    }
    return false;
  }();
  if (!fits)
    throw FrameError(fmt::format("malformed request to the store: {} keys and {} values", keys, values));
  return request;
}

std::string StoreReply::encode() const {
  Writer out;
  out.text(error);
  write_list(out, values);
  out.number(number);
  return out.take();
}

StoreReply StoreReply::decode(std::string_view payload) {
  Reader in(payload);
  StoreReply reply;
  reply.error = in.text();
  reply.values = read_list(in, kMostPayload);
  reply.number = in.number();
  in.end();
  return reply;
}

const std::string* StoreServer::lacking(const std::vector<std::string>& keys) const {
  for (const auto& key : keys)
    if (!values_.contains(key)) return &key;
  return nullptr;
}

void StoreServer::put(const std::string& key, std::string value) {
  auto [place, is_new] = values_.try_emplace(key);
  const auto before = is_new ? 0 : key.size() + place->second.size();
  const auto after = key.size() + value.size();
  if (value.size() > kMostReply) {
    if (is_new) values_.erase(place);
    throw Error(fmt::format("store: expected a value of at most {} bytes, got {}", kMostReply, value.size()));
  }
  if (bytes_ - before + after > kMostBytes) {
    if (is_new) values_.erase(place);
    throw Error(fmt::format("store: full, it holds {} bytes", bytes_));
  }
  bytes_ += after - before;
  place->second = std::move(value);
}

void StoreServer::erase(std::map<std::string, std::string>::iterator place) {
  bytes_ -= place->first.size() + place->second.size();
  values_.erase(place);
}

// Stores all of them or none.
void StoreServer::put_all(StoreRequest& request) {
  std::vector<std::optional<std::string>> before;
  try {
    for (std::size_t i = 0; i < request.keys.size(); ++i) {
      auto old = values_.find(request.keys[i]);
      before.push_back(old == values_.end() ? std::nullopt : std::optional(old->second));
      put(request.keys[i], std::move(request.values[i]));
    }
  } catch (const Error&) {
    before.pop_back();  // The failed one is unchanged.
    for (auto i = before.size(); i-- > 0;) {
      auto place = values_.find(request.keys[i]);
      if (before[i])
        put(request.keys[i], std::move(*before[i]));
      else
        erase(place);
    }
    throw;
  }
}

void StoreServer::handle(int who, StoreRequest request, Answer answer, std::int64_t id) {
  StoreReply reply;
  try {
    switch (request.call) {
      case StoreCall::set:
      case StoreCall::multi_set: put_all(request); break;
      case StoreCall::forget:
        std::erase_if(waiting_, [&](const auto& each) {
          return each.second.who == who && each.second.id == request.number;
        });
        return;
      case StoreCall::append: {
        auto old = values_.find(request.keys[0]);
        put(request.keys[0], (old == values_.end() ? "" : old->second) + request.values[0]);
        break;
      }
      case StoreCall::add: {
        auto old = values_.find(request.keys[0]);
        std::int64_t value = 0;
        if (old != values_.end()) {
          const char* end = old->second.data() + old->second.size();
          const auto [rest, problem] = std::from_chars(old->second.data(), end, value);
          if (problem != std::errc() || rest != end)
            throw Error(
                fmt::format("store: cannot add to key '{}': its value is not a number", request.keys[0]));
        }
        if (__builtin_add_overflow(value, request.number, &value)) throw Error("store: counter overflow");
        put(request.keys[0], std::to_string(value));
        reply.number = value;
        break;
      }
      case StoreCall::compare_set: {
        // As in c10d's stores: if the key is missing, it is set if nothing was expected. The reply is the
        // value stored then, or the expected one.
        auto old = values_.find(request.keys[0]);
        const auto &expected = request.values[0], &desired = request.values[1];
        const bool sets = old == values_.end() ? expected.empty() : old->second == expected;
        reply.values = {sets ? desired : old == values_.end() ? expected : old->second};
        if (sets) put(request.keys[0], desired);
        break;
      }
      case StoreCall::erase: {
        auto old = values_.find(request.keys[0]);
        reply.number = old != values_.end();
        if (old != values_.end()) erase(old);
        break;
      }
      case StoreCall::check: reply.number = lacking(request.keys) == nullptr; break;
      case StoreCall::count: reply.number = static_cast<std::int64_t>(values_.size()); break;
      case StoreCall::wait:
      case StoreCall::get: {
        if (const auto* key = lacking(request.keys)) {
          auto place = *key;
          waiting_.emplace(std::move(place), Waiting{who, id, std::move(request), std::move(answer)});
          return;
        }
        if (request.call == StoreCall::wait) break;
        std::size_t bytes = 0;
        for (const auto& key : request.keys) {
          const auto& value = values_.at(key);
          bytes += sizeof(std::uint32_t) + value.size();
          if (bytes > kMostReply)
            throw Error(
                fmt::format("store: the values of {} keys exceed the limit of {} bytes for one answer",
                            request.keys.size(), kMostReply));
          reply.values.push_back(value);
        }
        break;
      }
    }
  } catch (const FrameError&) {
    throw;
  } catch (const Error& error) {
    reply = {.error = error.what()};
  }
  answer(std::move(reply));
  for (const auto& key : request.keys) settle(key);
}

void StoreServer::settle(const std::string& key) {
  if (waiting_.empty() || !values_.contains(key)) return;
  auto [first, last] = waiting_.equal_range(key);
  std::vector<Waiting> ready;
  for (auto each = first; each != last; ++each) ready.push_back(std::move(each->second));
  waiting_.erase(first, last);
  for (auto& each : ready) handle(each.who, std::move(each.request), std::move(each.answer), each.id);
}

void StoreServer::forget(int who) {
  std::erase_if(waiting_, [&](const auto& each) { return each.second.who == who; });
}

StoreReply LocalStore::ask(const StoreRequest& request, Clock::time_point deadline,
                           const std::function<bool()>& failed) {
  request.check();
  std::unique_lock lock(mutex_);
  const int who = next_++;
  auto answer = std::make_shared<std::optional<StoreReply>>();
  server_.handle(who, request, [this, answer](StoreReply reply) {
    *answer = std::move(reply);
    changed_.notify_all();
  });
  const bool ended = changed_.wait_until(lock, deadline, [&] { return answer->has_value() || failed(); });
  if (*answer) return std::move(**answer);
  server_.forget(who);
  if (ended) throw Error("the job has failed");
  throw Error(fmt::format("store: timeout for: {}", fmt::join(request.keys, ", ")));
}

void LocalStore::wake() {
  std::lock_guard lock(mutex_);
  changed_.notify_all();
}

}  // namespace lockstep::control

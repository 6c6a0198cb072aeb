// The job's key-value store for rendezvous: the operations of c10d's stores, as messages. The coordinator
// serves it; ranks that are threads, and a single rank, use a LocalStore without a socket.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/control/wire/frame.h>

namespace lockstep::control {

using Clock = std::chrono::steady_clock;

enum class StoreCall : std::uint8_t {
  set,
  get,
  add,
  compare_set,
  erase,
  check,
  count,
  append,
  multi_set,
  wait,
  forget,
};

// A request: the call, then keys and values. get, wait and check take any number of keys. get and wait answer
// once all keys exist, wait without their values. forget cancels such a request and has no answer.
struct StoreRequest {
  StoreCall call{};
  std::vector<std::string> keys = {};
  std::vector<std::string> values = {};  // For set, compare_set (expected, desired), append and multi_set.
  std::int64_t number = 0;               // For add; for forget: the request to cancel.

  void check() const;  // Throws Error if the server would reject it and close the connection.
  std::string encode() const;
  static StoreRequest decode(std::string_view payload);  // Throws FrameError.
};

struct StoreReply {
  std::string error = {};  // Empty: success.
  std::vector<std::string> values = {};
  std::int64_t number = 0;

  std::string encode() const;
  static StoreReply decode(std::string_view payload);
};

// Not thread-safe.
class StoreServer {
 public:
  using Answer = std::function<void(StoreReply)>;
  // Answers at once, or once the requested keys exist.
  void handle(int who, StoreRequest request, Answer answer, std::int64_t id = 0);
  // Cancels the client's pending requests.
  void forget(int who);
  std::size_t size() const { return values_.size(); }
  std::size_t num_waiting() const { return waiting_.size(); }

 private:
  struct Waiting {
    int who = 0;
    std::int64_t id = 0;
    StoreRequest request;
    Answer answer;
  };
  void put(const std::string& key, std::string value);
  void put_all(StoreRequest& request);
  void erase(std::map<std::string, std::string>::iterator place);
  // The first missing key; null if all exist.
  const std::string* lacking(const std::vector<std::string>& keys) const;
  void settle(const std::string& key);

  std::map<std::string, std::string> values_;
  std::size_t bytes_ = 0;
  std::multimap<std::string, Waiting> waiting_;  // By one missing key each.
};

// A client's connection to the store, wherever the server is.
class Channel {
 public:
  virtual ~Channel() = default;
  // Sends a request and waits for the reply. Throws Error at the deadline, or when failed() turns true;
  // failed() is called again after wake().
  virtual StoreReply ask(const StoreRequest& request, Clock::time_point deadline,
                         const std::function<bool()>& failed) = 0;
  virtual void wake() = 0;
};

// Store for ranks that are threads of this process, and for a world of one. Thread-safe.
class LocalStore final : public Channel {
 public:
  StoreReply ask(const StoreRequest& request, Clock::time_point deadline,
                 const std::function<bool()>& failed) override;
  void wake() override;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  StoreServer server_;
  int next_ = 0;
};

}  // namespace lockstep::control

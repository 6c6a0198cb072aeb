// Keys and values through which the ranks of a job find one another: what c10d's stores offer, as messages.
// The head serves them; where ranks are threads, or alone, a LocalChannel does without a socket.
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

// Requests: the call, then keys and values. get, wait and check take any number of keys; get and wait answer
// when all of them are there, wait without their values. forget ends such a request, and has no answer.
struct StoreRequest {
  StoreCall call{};
  std::vector<std::string> keys = {};
  std::vector<std::string> values = {};  // of set, compare_set (expected, desired), append, multi_set
  std::int64_t number = 0;               // of add; of forget: the request that it ends

  void check() const;  // throws Error where a server would not take it, and would cut off who sent it
  std::string encode() const;
  static StoreRequest decode(std::string_view payload);  // throws FrameError
};

struct StoreReply {
  std::string error = {};  // empty: it worked
  std::vector<std::string> values = {};
  std::int64_t number = 0;

  std::string encode() const;
  static StoreReply decode(std::string_view payload);
};

// Not for several threads.
class StoreServer {
 public:
  using Answer = std::function<void(StoreReply)>;
  // Answers at once, or when the keys that it asks for are there.
  void handle(int who, StoreRequest request, Answer answer, std::int64_t id = 0);
  // Whoever it is does not want its answers any more.
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
  // The first key that is not there; null: all are.
  const std::string* lacking(const std::vector<std::string>& keys) const;
  void settle(const std::string& key);

  std::map<std::string, std::string> values_;
  std::size_t bytes_ = 0;
  std::multimap<std::string, Waiting> waiting_;  // by a key that each lacks
};

// How a rank asks, wherever the server is.
class Channel {
 public:
  virtual ~Channel() = default;
  // Throws Error when there is no answer by then, or when failed() turns true: it is asked after wake().
  virtual StoreReply ask(const StoreRequest& request, Clock::time_point deadline,
                         const std::function<bool()>& failed) = 0;
  virtual void wake() = 0;
};

// The server's threads are its clients: ranks as threads, and a world of one.
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

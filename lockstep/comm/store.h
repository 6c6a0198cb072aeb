// A store whose calls end when somebody says so. Engines meet through it; a peer that never comes, or a
// server that is stopped, must not keep them beyond the deadline or a verdict.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::detail {

class WatchedStore final : public c10d::Store {
 public:
  // check is called some times a second while a call goes on; it throws to end it.
  WatchedStore(c10::intrusive_ptr<c10d::Store> inner, std::chrono::milliseconds timeout,
               std::function<void()> check);

  c10::intrusive_ptr<c10d::Store> clone() override;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<uint8_t>>& values) override;
  bool hasExtendedApi() const override;

 private:
  class Clerk;  // a thread that makes the calls of c10d's store, which cannot be woken

  WatchedStore(c10::intrusive_ptr<c10d::Store> inner, std::chrono::milliseconds timeout,
               std::function<void()> check, std::shared_ptr<Clerk> clerk);
  template <typename F>
  auto ask(F f) -> decltype(f());

  const c10::intrusive_ptr<c10d::Store> inner_;
  const std::function<void()> check_;
  const std::shared_ptr<Clerk> clerk_;
};

// Text values, for our own use.
void put(c10d::Store& store, const std::string& key, const std::string& value);
std::string take(c10d::Store& store, const std::string& key);

}  // namespace lockstep::detail

// JobStore: the job's key-value store as a c10d::Store. Each call ends with a result, at its deadline or at a
// verdict.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/control/coordinator/store.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::detail {

// The values of a c10d::Store are bytes.
inline std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

class JobStore final : public c10d::Store {
 public:
  // failed returns why waiting is pointless, or an empty string while the job is healthy. The channel is
  // woken when that changes.
  JobStore(std::shared_ptr<control::Channel> channel, std::string prefix, std::chrono::milliseconds timeout,
           std::function<std::string()> failed);

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
  bool hasExtendedApi() const override { return true; }

 private:
  control::StoreReply ask(control::StoreCall call, const std::vector<std::string>& keys,
                          std::vector<std::string> values = {}, int64_t number = 0);
  control::StoreReply ask(control::StoreCall call, const std::vector<std::string>& keys,
                          std::vector<std::string> values, int64_t number, std::chrono::milliseconds timeout);

  const std::shared_ptr<control::Channel> channel_;
  const std::string prefix_;
  const std::function<std::string()> failed_;
};

// Text values, for internal use.
void put(c10d::Store& store, const std::string& key, const std::string& value);
std::string take(c10d::Store& store, const std::string& key);

}  // namespace lockstep::detail

// ConnectBarrier: a barrier in the store before a call in which an engine would wait without a deadline.
// NCCL, for example, creates its communicators inside the first operation. Ranks meet here first, and either
// all of them enter the call or none does.
#pragma once

#include <chrono>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include <c10/util/FunctionRef.h>
#include <lockstep/base/error.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::detail {

// Names the missing ranks, or the rank that gave up.
class NotMet : public KindedError {
 public:
  using KindedError::KindedError;
};

class ConnectBarrier {
 public:
  ConnectBarrier(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : store_(std::move(store)), rank_(rank), size_(size) {}

  // Waits until all ranks have reached this barrier, or with a peer, until that peer has reached it with this
  // rank. Later calls return at once, with false. Throws NotMet at the limit, if another rank gave up, or if
  // stopped() returns true. waits is called before and after the wait. Thread-safe.
  bool await(std::optional<int> peer, std::chrono::milliseconds limit, c10::function_ref<void(bool)> waits,
             c10::function_ref<bool()> stopped);
  // Called once two ranks have met. Returns true if both now hold what they need to enter the call, for
  // example a lock that their other threads need too; a rank stays ready only for a moment. On false, release
  // the lock and try again. Once it has returned true, it returns true at once.
  bool enter(int peer);
  bool has_entered(int peer);

 private:
  bool arrive(const std::string& who, std::optional<int> peer, std::chrono::milliseconds limit,
              c10::function_ref<bool()> stopped);
  void settle(const std::string& who, const std::string& outcome);

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_, size_;
  std::mutex mutex_;
  std::set<std::optional<int>> met_, arrived_, entered_;
};

}  // namespace lockstep::detail

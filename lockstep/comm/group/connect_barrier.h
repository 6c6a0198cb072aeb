// Some engines wait without a deadline, inside a call, until all who take part in a first operation have
// come: NCCL makes its communicators so. Ranks meet here before they enter such a call, and all of them enter
// it or none.
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

// Names the ranks that are missing, or the one that has given up.
class NotMet : public KindedError {
 public:
  using KindedError::KindedError;
};

class ConnectBarrier {
 public:
  ConnectBarrier(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : store_(std::move(store)), rank_(rank), size_(size) {}

  // Until all ranks have come here, or with a peer until that has come here with this rank. Once that was so
  // it returns at once, and false. Throws NotMet at the limit, where another rank has given up, and where
  // stopped() says that there is no use. waits: told before and after it does. Any thread.
  bool await(std::optional<int> peer, std::chrono::milliseconds limit, c10::function_ref<void(bool)> waits,
             c10::function_ref<bool()> stopped);
  // Of two who have met: whether both hold now what they need to enter the call, such as a lock that others
  // of their threads want, too; it is held for a moment only. False: let go of it and try again. Once it was
  // true it is at once.
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

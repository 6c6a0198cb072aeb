// Handle to an asynchronous operation.
//
//   auto work = group.all_reduce(gradients);   // started
//   ...                                        // compute meanwhile
//   work.wait();                               // here the sum is in gradients
//
// A Work may be dropped without waiting. Dropping does not block, the tensors stay alive until the operation
// ends, and the group's next call reports an error.
#pragma once

#include <chrono>
#include <memory>
#include <optional>

#include <lockstep/comm/call.h>

namespace lockstep {

namespace detail {
class WorkState;
}

class [[nodiscard("call .wait(), or keep the Work and wait later")]] Work {
 public:
  explicit Work(std::shared_ptr<detail::WorkState> pending);
  Work(Work&&) noexcept = default;
  Work& operator=(Work&& other) noexcept;
  ~Work();

  // Waits until the operation is complete and its results are in the tensors (on CUDA: for everything that
  // the current stream does from here on). Throws CommError at the deadline, when the job fails, or when the
  // engine fails, whichever is first; the group cannot be used afterwards. May be called again: it returns or
  // throws the same. Thread-safe; concurrent waits for one Work run one after another.
  void wait();
  // The same with its own deadline, if that is earlier. When it passes the operation fails. To poll, use
  // done().
  void wait(std::chrono::milliseconds timeout);

  // True once the operation has ended, with or without an error; wait() reports which. Never blocks.
  bool done();

  // Rank that a receive from any rank came from. Available after wait().
  std::optional<int> source() const;

  const Call& call() const;

 private:
  detail::WorkState& pending() const;
  void drop() noexcept;
  std::shared_ptr<detail::WorkState> pending_;
};

}  // namespace lockstep

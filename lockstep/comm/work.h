// An operation under way.
//
//   auto work = group.all_reduce(gradients);   // started
//   ...                                        // compute meanwhile
//   work.wait();                               // here the sum is in gradients
//
// A Work may be dropped: that does not block, the tensors stay alive until the operation ends, and an
// error surfaces at the group's next call.
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

  // Returns when the operation is complete: results are in the tensors (on CUDA: for everything that the
  // current stream does from here on). Throws CommError at the deadline, at a failure verdict, or when
  // the engine failed, whichever comes first; the group is of no use then. May be called again: it
  // returns or throws the same. Any thread; waits of several threads for one Work follow one another.
  void wait();
  // With a deadline of its own for this wait, if that is earlier; as final as the other. done() only looks.
  void wait(std::chrono::milliseconds timeout);

  // Whether the operation has ended, well or not; wait() tells which. Never blocks.
  bool done();

  // The rank that a receive from any rank came from, after wait().
  std::optional<int> source() const;

  const Call& call() const;

 private:
  detail::WorkState& pending() const;
  void drop() noexcept;
  std::shared_ptr<detail::WorkState> pending_;
};

}  // namespace lockstep

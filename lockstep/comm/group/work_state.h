// WorkState: the state behind a Work. It holds the engine's work objects, the tensors that must stay alive,
// and what remains to be done once the engine is done.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <lockstep/base/awake_clock.h>
#include <lockstep/comm/group/group_state.h>

namespace lockstep::detail {

using Clock = AwakeClock;  // deadlines do not pass while the process is stopped

class Bell;

class WorkState : public std::enable_shared_from_this<WorkState> {
 public:
  WorkState(std::shared_ptr<GroupState> group, std::shared_ptr<Transport> transport, Call call,
            std::chrono::milliseconds timeout);

  // Filled by one thread while the operation is issued.
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<at::Tensor> keep;
  std::vector<std::function<void()>> finish;  // run in order once the engine is done
  bool by_messages = false;                   // True if it consists of the engine's sends and receives
  control::FlightRing::Ticket record = control::FlightRing::kNone;
  // Used instead of works for an engine that takes Ops. Tensors are dense and kept alive. If the call has a
  // table of sizes, one tensor stands for all its pieces.
  void post(OpSink& engine, c10::ArrayRef<at::Tensor> inputs, c10::ArrayRef<at::Tensor> outputs);
  // Joins the operation with only the reason for a refusal (refusal.h).
  void post_refusal(OpSink& engine, std::string text);

  std::chrono::steady_clock::time_point begun() const { return moment_.steady; }
  const Call& call() const { return item_.op.call; }
  GroupState& group() const { return *group_; }
  const std::shared_ptr<Transport>& transport() const { return transport_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  Clock::time_point deadline() const { return deadline_; }
  // Rest of the timeout, at least a moment.
  std::chrono::milliseconds left() const;
  // Timeout that is passed to the engine.
  std::chrono::milliseconds engine_timeout() const;
  // True if the engine reports completion of a send or receive only to a waiter.
  bool needs_watching() const;
  std::optional<int> source() const;

  // Throws CommError if it failed.
  void wait(std::optional<std::chrono::milliseconds> limit);
  // The same for an internal caller: a failure stays to be reported to the program.
  void await(std::optional<std::chrono::milliseconds> limit);
  bool done();
  bool failed() const { return state_.load(std::memory_order_acquire) == State::failed; }
  CommError error() const { return CommError(error_); }  // only after a failure
  // After a failure: true if a call has thrown this error, or the error that failed the whole group.
  bool heard() const;
  bool settled() const { return state_.load(std::memory_order_acquire) != State::running; }
  // Marks the operation as part of a batch that the engine does not have yet, so it cannot be waited for.
  // hand_over() ends that; work is the batch's work, if the engine has one.
  void hold() { held_.store(true, std::memory_order_release); }
  void hand_over(const c10::intrusive_ptr<c10d::Work>& work);
  // The engine rejected the operation while it was issued.
  void settle_at_issue(const std::exception& error);
  [[noreturn]] void fail_at_issue(const std::exception& error);
  [[noreturn]] void throw_error() const;

 private:
  enum class State { running, complete, failed };

  struct Item final : OpItem {
    std::exception_ptr error;
    std::atomic<bool> finished = false;
    void done(const std::exception_ptr& its_error, int source) override;
  };

  void wait_locked(Clock::time_point deadline);
  void wait_for_part(Clock::time_point deadline);
  void hear_control_plane(const std::exception& error, Clock::time_point deadline);
  void wait_for(c10d::Work& work, Clock::time_point deadline);
  void wait_in_engine(c10d::Work& work, Clock::time_point deadline);
  // Waits until it rings. Throws at the deadline, when the job has failed, or when a peer has disappeared.
  void wait_for_bell(Bell& bell, Clock::time_point deadline);
  std::optional<int> lost_peer() const;
  // The cause of a failure. A deadline that passed explains more than the engine's error.
  struct Failure {
    std::string cause;
    CommError::Kind kind;
    bool refused = false;  // by this rank or a peer: the group stays usable
  };
  Failure failure_of(const std::exception& error, Clock::time_point deadline);
  void settle_complete();
  void settle_failed(Failure failure);

  const std::shared_ptr<GroupState> group_;
  const std::shared_ptr<Transport> transport_;
  Item item_;  // holds the call, for every engine
  OpSink* parts_ = nullptr;
  const Clock::Moment moment_ = Clock::moment();
  const Clock::time_point start_ = moment_.awake;
  const std::chrono::milliseconds timeout_;
  const Clock::time_point deadline_;
  // Held while a thread waits inside the engine. A verdict interrupts the engine and so releases it.
  std::timed_mutex mutex_;
  std::size_t waited_ = 0;  // number of works that are complete
  std::atomic<State> state_ = State::running;
  std::atomic<bool> watched_ = false, held_ = false;
  std::optional<int> source_;
  CommError::Details error_;
  bool refused_ = false;  // with error_: the group lives
  mutable std::atomic<bool> thrown_ = false;
};

// What an error reports about its call; the caller adds cause, peer and time.
CommError::Details details_of(const Call& call);

}  // namespace lockstep::detail

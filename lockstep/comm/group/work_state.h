// What a Work holds: the engine's own work objects, the tensors that must live as long, and what is left
// to do when the engine is done.
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

  // Filled while the operation is issued, by one thread.
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<at::Tensor> keep;
  std::vector<std::function<void()>> finish;  // in order: what is left when the engine is done
  bool by_messages = false;                   // it is made of the engine's sends and receives
  control::FlightRing::Ticket record = control::FlightRing::kNone;
  // In place of works, for an engine that takes parts. Tensors are dense and kept; one tensor where the call
  // has a table of sizes stands for its pieces.
  void post(OpSink& engine, c10::ArrayRef<at::Tensor> inputs, c10::ArrayRef<at::Tensor> outputs);
  // Takes part with nothing but the reason for not taking part (refusal.h).
  void post_refusal(OpSink& engine, std::string text);

  std::chrono::steady_clock::time_point begun() const { return moment_.steady; }
  const Call& call() const { return item_.op.call; }
  GroupState& group() const { return *group_; }
  const std::shared_ptr<Transport>& transport() const { return transport_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  Clock::time_point deadline() const { return deadline_; }
  // Of the timeout, at least a moment.
  std::chrono::milliseconds left() const;
  // What the engine is told.
  std::chrono::milliseconds engine_timeout() const;
  // Sends and receives of some engines complete unseen unless somebody waits for them.
  bool needs_watching() const;
  std::optional<int> source() const;

  // CommError where it has failed.
  void wait(std::optional<std::chrono::milliseconds> limit);
  // The same for who is not the program: a failure is left for the program to hear.
  void await(std::optional<std::chrono::milliseconds> limit);
  bool done();
  bool failed() const { return state_.load(std::memory_order_acquire) == State::failed; }
  CommError error() const { return CommError(error_); }  // of one that has failed
  // Of one that has failed: whether a call has thrown its error, or that of what failed its whole group.
  bool heard() const;
  bool settled() const { return state_.load(std::memory_order_acquire) != State::running; }
  // In a batch that the engine does not have yet: nobody can wait for it. Then work is that of the batch,
  // where the engine has one.
  void hold() { held_.store(true, std::memory_order_release); }
  void hand_over(const c10::intrusive_ptr<c10d::Work>& work);
  // The engine refused the operation while it was issued.
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
  // Until it rings; throws at the deadline, at a verdict, or when a peer is seen to be gone.
  void wait_for_bell(Bell& bell, Clock::time_point deadline);
  std::optional<int> lost_peer() const;
  // A deadline that has passed says more than the engine.
  struct Failure {
    std::string cause;
    CommError::Kind kind;
    bool refused = false;  // by this rank or a peer: the group lives
  };
  Failure failure_of(const std::exception& error, Clock::time_point deadline);
  void settle_complete();
  void settle_failed(Failure failure);

  const std::shared_ptr<GroupState> group_;
  const std::shared_ptr<Transport> transport_;
  Item item_;  // has the call, whichever engine it goes to
  OpSink* parts_ = nullptr;
  const Clock::Moment moment_ = Clock::moment();
  const Clock::time_point start_ = moment_.awake;
  const std::chrono::milliseconds timeout_;
  const Clock::time_point deadline_;
  // Held by whoever waits inside the engine; a verdict interrupts the engine and so frees it.
  std::timed_mutex mutex_;
  std::size_t waited_ = 0;  // works that are complete
  std::atomic<State> state_ = State::running;
  std::atomic<bool> watched_ = false, held_ = false;
  std::optional<int> source_;
  CommError::Details error_;
  bool refused_ = false;  // with error_: the group lives
  mutable std::atomic<bool> thrown_ = false;
};

// What an error says of the call that it ended; cause, peer and time are the caller's to add.
CommError::Details details_of(const Call& call);

}  // namespace lockstep::detail

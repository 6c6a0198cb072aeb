#include <lockstep/comm/group/work_state.h>

#include <algorithm>
#include <condition_variable>
#include <thread>

#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <lockstep/base/span.h>
#include <lockstep/base/start_thread.h>
#include <lockstep/comm/c10d/tensors.h>
#include <lockstep/comm/group/connect_barrier.h>
#include <lockstep/comm/group/error_text.h>
#include <lockstep/comm/job/world_state.h>

namespace lockstep::detail {

using std::chrono::duration;
using std::chrono::duration_cast;
using std::chrono::milliseconds;

CommError::Details details_of(const Call& call) {
  CommError::Details details;
  details.operation = name(call.operation);
  details.group = call.group;
  details.rank = call.rank;
  details.size = call.size;
  details.sequence = call.sequence;
  details.tensor = tensor_text(call);
  details.tag = call.tag;
  details.call_site = site_text(call);
  return details;
}

namespace {

// How often a wait checks that its peers are still there.
constexpr milliseconds kWatchInterval(100);
// How long an engine's error waits for the control plane to name the rank to blame.
constexpr milliseconds kHearing(500);
// Timeout for an engine whose waits Lockstep ends itself, at the deadline or at a verdict.
constexpr milliseconds kEnginePatience = std::chrono::hours(30 * 24);

}  // namespace

// Rung by completion or by a verdict, whichever is first.
class Bell {
 public:
  void ring() {
    std::lock_guard lock(mutex_);
    rung_ = true;
    condition_.notify_all();
  }
  bool wait_until(Clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    return condition_.wait_until(lock, deadline, [&] { return rung_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable condition_;
  bool rung_ = false;
};

WorkState::WorkState(std::shared_ptr<GroupState> group, std::shared_ptr<Transport> transport, Call its_call,
                     milliseconds timeout)
    : group_(std::move(group)),
      transport_(std::move(transport)),
      timeout_(timeout),
      deadline_(start_ + timeout) {
  item_.op.call = std::move(its_call);
}

void WorkState::Item::done(const std::exception_ptr& its_error, int /*source*/) {
  error = its_error;
  finished.store(true, std::memory_order_release);
  finished.notify_all();
}

void WorkState::post(OpSink& engine, c10::ArrayRef<at::Tensor> inputs, c10::ArrayRef<at::Tensor> outputs) {
  Op& op = item_.op;
  for (const auto* tensors : {&inputs, &outputs})
    for (const auto& tensor : *tensors) op.item_size = tensor.element_size();
  auto add = [&](auto& places, auto* place, const std::vector<std::int64_t>& table, std::size_t tensors) {
    places.push_back(place);
    if (tensors != 1 || table.empty()) return;
    for (std::size_t i = 0; i + 1 < table.size(); ++i)
      places.push_back(place += static_cast<std::size_t>(table[i]) * op.item_size);
  };
  for (const auto& tensor : inputs)
    add(op.inputs, static_cast<const char*>(tensor.const_data_ptr()), call().to, inputs.size());
  for (const auto& tensor : outputs)
    add(op.outputs, static_cast<char*>(tensor.mutable_data_ptr()), call().from, outputs.size());
  for (auto& copy : copy_what_is_written_over(op)) keep.push_back(std::move(copy));
  parts_ = &engine;
  item_.posted = start_;
  item_.deadline = deadline_;
  engine.post({shared_from_this(), &item_}, false);
}

void WorkState::post_refusal(OpSink& engine, std::string text) {
  item_.op.refusal = std::move(text);
  post(engine, {}, {});
}

void WorkState::wait_for_part(Clock::time_point deadline) {
  if (!item_.finished.load(std::memory_order_acquire)) {
    parts_->wait(item_, deadline);
    item_.finished.wait(false, std::memory_order_acquire);
  }
  if (item_.error) std::rethrow_exception(item_.error);
}

bool WorkState::needs_watching() const { return by_messages && !transport_->traits().completes_unwatched; }

std::optional<int> WorkState::source() const {
  if (!settled()) return std::nullopt;
  return source_;
}

void WorkState::wait(std::optional<milliseconds> limit) {
  await(limit);
  if (state_ == State::failed) throw_error();
}

void WorkState::await(std::optional<milliseconds> limit) {
  auto deadline = limit ? std::min(deadline_, Clock::now() + checked_timeout(*limit)) : deadline_;
  if (!settled()) {
    group_->refuse_in_child(call());
    if (held_.load(std::memory_order_acquire))
      throw ConfigError(fmt::format(
          "{} #{} of group '{}' cannot be waited for within coalesce: it starts when coalesce returns",
          name(call().operation), call().sequence, call().group));
    const Span span(SpanKind::wait, name(call().operation), call().bytes,
                    {call().group_key, call().sequence, point_to_point(call().operation)});
    group_->note_wait(call(), true);
    const control::StatusWriter::Blocked blocked(group_->status());
    std::unique_lock lock(mutex_, std::defer_lock);
    // try_lock() succeeds almost always; try_lock_until() reads two clocks first.
    if (!lock.try_lock() && !lock.try_lock_until(deadline)) {
      // Another thread waits in the engine with a later deadline than ours: the verdict wakes it.
      group_->fail(
          {fmt::format("{} #{} did not complete within {:.3f} s (its deadline)", name(call().operation),
                       call().sequence, duration<double>(Clock::now() - start_).count()),
           std::nullopt, CommError::Kind::deadline});
      lock.lock();
    }
    const bool elsewhere = settled();
    if (!elsewhere) wait_locked(deadline);
    // If it completed here, recording its end has already ended the wait.
    if (elsewhere || state_ == State::failed) group_->note_wait(call(), false);
  }
}

void WorkState::wait_locked(Clock::time_point deadline) {
  try {
    if (parts_) wait_for_part(deadline);
    for (; waited_ < works.size(); ++waited_) wait_for(*works[waited_], deadline);
    settle_complete();
  } catch (const std::exception& error) {
    hear_control_plane(error, deadline);
    settle_failed(failure_of(error, deadline));
  }
}

milliseconds WorkState::left() const {
  return std::max(duration_cast<milliseconds>(deadline_ - Clock::now()), milliseconds(1));
}

// An engine's timeout runs while the process is stopped, and our deadline does not. If our own waits enforce
// the deadline, the engine must not time out first.
milliseconds WorkState::engine_timeout() const {
  const auto traits = transport_->traits();
  return traits.blocks_host && !traits.wakes_waiters ? kEnginePatience : timeout_;
}

void WorkState::wait_in_engine(c10d::Work& work, Clock::time_point deadline) {
  for (;;) {
    // c10d reads 0 as "no limit", so a deadline that has passed becomes the shortest wait.
    const auto left =
        std::max(duration_cast<milliseconds>(deadline - Clock::now()) + milliseconds(1), milliseconds(1));
    try {
      work.wait(left);
      return;
    } catch (...) {
      // The process was stopped meanwhile and there is time left: the work is still intact.
      if (work.isCompleted() || group_->verdict() || Clock::now() >= deadline) throw;
    }
  }
}

void WorkState::wait_for(c10d::Work& work, Clock::time_point deadline) {
  const auto traits = transport_->traits();
  if (!traits.blocks_host) {
    // Before the wait: a barrier's wait blocks the program.
    if (!transport_->capturing()) group_->watch_device(transport_->watched(work), call(), start_, deadline);
    work.wait();  // with a limit, NCCL would block the program instead of the stream
    // An aborted work counts as complete too.
    if (group_->verdict()) throw Error("it was interrupted");
  } else if (traits.wakes_waiters || work.isCompleted()) {
    wait_in_engine(work, deadline);
    if (traits.on_device && !work.isCompleted())
      group_->watch_device(transport_->watched(work), call(), start_, deadline);
  } else if (by_messages) {
    // Gloo's own wait cannot be split: a timeout there closes the connection.
    auto bell = std::make_shared<Bell>();
    std::exception_ptr error;
    bool complete = false;
    auto waiter = start_thread("waiting for a message", [&, bell] {
      try {
        complete = work.wait(kEnginePatience);
      } catch (...) {
        error = std::current_exception();
      }
      bell->ring();
    });
    std::exception_ptr trouble;
    try {
      wait_for_bell(*bell, deadline);
    } catch (...) {
      trouble = std::current_exception();
      work.abort();
    }
    waiter.join();
    if (complete) return;
    if (trouble) std::rethrow_exception(trouble);
    if (error) std::rethrow_exception(error);
    throw Error("it was interrupted");
  } else {
    auto bell = std::make_shared<Bell>();
    auto future = work.getFuture();
    future->addCallback([bell](c10::ivalue::Future&) { bell->ring(); });
    wait_for_bell(*bell, deadline);
    work.wait(kEnginePatience);  // it is complete
  }
}

void WorkState::wait_for_bell(Bell& bell, Clock::time_point deadline) {
  std::atomic<bool> judged = false;
  GroupState::FailureWatch watch(*group_, [&] {
    judged = true;
    bell.ring();
  });
  while (!bell.wait_until(std::min(deadline, Clock::now() + kWatchInterval))) {
    if (Clock::now() >= deadline) throw Error("the deadline has passed");
    if (auto lost = lost_peer()) {
      error_.peer = *lost;
      throw KindedError(
          CommError::Kind::peer_died,
          fmt::format("rank {} has closed its connection: it has exited or left the job", *lost));
    }
  }
  if (judged) throw Error("it was interrupted");
}

// Returns a lost rank that this operation needs.
std::optional<int> WorkState::lost_peer() const {
  const auto lost = transport_->lost_peers();
  if (!point_to_point(call().operation)) {
    // A rank that left in order has completed its part of everything that it had begun.
    for (int rank : lost)
      if (auto begun = group_->left_after(rank); !begun || *begun <= call().sequence) return rank;
    return std::nullopt;
  }
  for (int rank : lost)
    if (rank == call().root) return rank;
  // A message from any rank can still arrive as long as some rank is left.
  if (call().root >= 0 || lost.empty()) return std::nullopt;
  for (int rank : lost)
    if (!group_->left_after(rank)) return rank;
  return static_cast<int>(lost.size()) + 1 < group_->size() ? std::nullopt : std::optional(lost.front());
}

WorkState::Failure WorkState::failure_of(const std::exception& error, Clock::time_point deadline) {
  auto kind = CommError::Kind::engine;
  if (const auto* kinded = dynamic_cast<const Kinded*>(&error)) {
    kind = kinded->kind();
  } else if (dynamic_cast<const c10::AcceleratorError*>(&error) != nullptr) {
    kind = CommError::Kind::device;
  } else if (const auto lost = group_->verdict() ? std::nullopt : lost_peer()) {
    kind = CommError::Kind::peer_died;
    error_.peer = *lost;
  }
  if (Clock::now() < deadline || kind == CommError::Kind::mismatch ||
      dynamic_cast<const NotMet*>(&error) != nullptr)
    return {plain_text(error), kind, dynamic_cast<const Refused*>(&error) != nullptr};
  auto cause = fmt::format("it did not complete within {:.3f} s (its deadline)",
                           duration<double>(deadline - start_).count());
  auto absent = point_to_point(call().operation) ? "" : transport_->absent(call().sequence);
  return {absent.empty() ? cause : cause + "; " + absent, CommError::Kind::deadline};
}

bool WorkState::done() {
  if (settled()) return true;
  group_->refuse_in_child(call());
  if (held_.load(std::memory_order_acquire)) return false;
  if (needs_watching()) {
    if (!watched_.exchange(true)) group_->watch(shared_from_this());
    return settled();
  }
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return false;
  if (settled()) return true;
  const std::size_t last = parts_ ? waited_ + 1 : works.size();
  for (std::size_t i = waited_; i < last; ++i) {
    if (parts_ ? item_.finished.load(std::memory_order_acquire) : works[i]->isCompleted()) continue;
    if (group_->verdict()) {
      settle_failed({{}, CommError::Kind::stopped});  // the verdict has the cause
      return true;
    }
    if (Clock::now() < deadline_) return false;
  }
  wait_locked(deadline_);
  return true;
}

// An engine notices a lost peer before the agent knows the cause.
void WorkState::hear_control_plane(const std::exception& error, Clock::time_point deadline) {
  const bool ours = dynamic_cast<const Error*>(&error) != nullptr;
  if (!ours) (void)transport_->lost_peers();  // records when connections ended, for failure_of()
  if (!ours && Clock::now() < deadline && !group_->verdict()) group_->world().await_failure(kHearing);
}

void WorkState::settle_complete() {
  c10::NoGradGuard no_grad;
  for (const auto& step : finish) step();
  if (call().operation == Operation::recv)
    source_ = call().root != kAnyRank ? call().root : works.back()->sourceRank();
  // Works of the engine hold tensors.
  works.clear();
  finish.clear();
  keep.clear();
  if (group_->world().is_observed()) {
    const auto elapsed = Clock::now() - start_;
    group_->world().observe([&](Observer& observer) { observer.finished(call(), elapsed); });
  }
  group_->note_end(call(), record, false);
  state_.store(State::complete, std::memory_order_release);
}

void WorkState::settle_failed(Failure failure) {
  auto& [cause, kind, refused] = failure;
  const auto elapsed = Clock::now() - start_;
  const auto peer = error_.peer;  // already known if a connection has ended
  error_ = details_of(call());
  error_.peer = peer;
  error_.elapsed = elapsed;
  if (point_to_point(call().operation) && call().root >= 0) error_.peer = call().root;

  // A verdict explains more than the error of the engine that it interrupted.
  if (auto verdict = group_->verdict()) {
    cause = verdict->cause;
    kind = verdict->kind;
    refused = false;
    if (auto place = group_->place_of(verdict->rank)) error_.peer = place;
  }
  error_.cause = cause;
  error_.kind = kind;
  refused_ = refused;
  group_->note_end(call(), record, true);  // the program may catch the error and continue
  if (refused) {                           // nothing was read or written, and the next operation can succeed
    keep.clear();
    state_.store(State::failed, std::memory_order_release);
    return;
  }
  group_->fail({fmt::format("{} #{} at {} failed: {}", name(call().operation), call().sequence,
                            site_text(call()), cause),
                std::nullopt, kind});
  if (auto* client = group_->world().client())
    client->tell(control::Fault{control::Fault::Kind::comm, CommError(error_).what()});
  group_->world().observe([&](Observer& observer) { observer.failed(call(), elapsed, error_.cause); });
  // Keep the tensors: the engine may still write to them.
  if (parts_) transport_->abandon(keep);
  state_.store(State::failed, std::memory_order_release);
}

bool WorkState::heard() const {
  return thrown_ || group_->told() >= (refused_ ? GroupState::Told::refusal : GroupState::Told::failure);
}

void WorkState::throw_error() const {
  thrown_ = true;
  group_->note_told(refused_ ? GroupState::Told::refusal : GroupState::Told::failure);
  throw CommError(error_);
}

void WorkState::settle_at_issue(const std::exception& error) {
  std::lock_guard lock(mutex_);
  hear_control_plane(error, deadline_);
  settle_failed(failure_of(error, deadline_));
}

void WorkState::fail_at_issue(const std::exception& error) {
  settle_at_issue(error);
  throw_error();
}

void WorkState::hand_over(const c10::intrusive_ptr<c10d::Work>& work) {
  if (work && !works.empty()) works.assign(1, work);
  held_.store(false, std::memory_order_release);
}

}  // namespace lockstep::detail

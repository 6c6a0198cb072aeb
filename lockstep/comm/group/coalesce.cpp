// Group::coalesce: operations that are submitted to their engine as one batch.
#include <mutex>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/group.h>
#include <lockstep/comm/group/host_call.h>

namespace lockstep::detail {

const GroupState*& GroupState::coalescing() {
  thread_local const GroupState* group = nullptr;
  return group;
}

void GroupState::refuse_within_coalesce(std::string_view what) const {
  if (const auto* group = coalescing())
    throw ConfigError(fmt::format(
        "{} on group '{}' cannot be called within coalesce of group '{}': call only collectives, send and "
        "recv of that group, and wait for them afterwards",
        what, name_, group->name_));
}

void GroupState::coalesce(const std::function<void()>& calls) {
  refuse_within_coalesce("coalesce");
  refuse_in_child({.operation = Operation::barrier, .rank = rank_, .size = size(), .group = name_});
  // An engine has one batch at a time, whichever thread calls: keep the operations of other threads out.
  const std::scoped_lock order(issue_mutex_, message_mutex_);
  coalescing() = this;
  std::exception_ptr trouble;
  try {
    calls();
  } catch (...) {
    trouble = std::current_exception();
  }
  // Submit what was started even after an exception: other ranks may have started it too.
  try {
    hand_over();
  } catch (...) {
    if (!trouble) trouble = std::current_exception();
  }
  coalescing() = nullptr;
  if (trouble) std::rethrow_exception(trouble);
}

void GroupState::together(Transport& engine, WorkState& pending, c10::function_ref<void()> messages) {
  if (size() == 1 || coalescing() == this || !engine.backend().supportsCoalescing()) return messages();
  const std::lock_guard order(message_mutex_);
  engine.backend().startCoalescing();
  try {
    messages();
  } catch (...) {
    engine.backend().endCoalescing();
    throw;
  }
  pending.hand_over(engine.backend().endCoalescing());
}

void GroupState::add_to_batch(const std::shared_ptr<Transport>& engine,
                              const std::shared_ptr<WorkState>& pending) {
  if (engine->backend().supportsCoalescing() && !batched_works_.contains(engine)) {
    engine->backend().startCoalescing();
    batched_works_.try_emplace(engine);
  }
  batch_.push_back(pending);
  pending->hold();
}

void GroupState::hand_over() {
  const auto batch = std::exchange(batch_, {});
  auto works = std::exchange(batched_works_, {});
  std::exception_ptr trouble;
  for (auto& [engine, work] : works) {
    try {
      const HostCall here(*this, *engine, *batch.front());
      work = engine->backend().endCoalescing();
    } catch (...) {
      trouble = std::current_exception();
    }
  }
  for (const auto& pending : batch) {
    const auto found = works.find(pending->transport());
    pending->hand_over(found == works.end() ? nullptr : found->second);
    keep_track(pending);
  }
  if (!trouble) return;
  try {
    std::rethrow_exception(trouble);
  } catch (const std::exception& error) {
    for (const auto& pending : batch)
      if (!pending->settled()) pending->settle_at_issue(error);
    batch.front()->throw_error();
  }
}

}  // namespace lockstep::detail

namespace lockstep {

void Group::coalesce(const std::function<void()>& calls) { state_->coalesce(calls); }

}  // namespace lockstep

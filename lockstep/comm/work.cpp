#include <lockstep/comm/work.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/group/group_state.h>
#include <lockstep/comm/group/work_state.h>

namespace lockstep {

Work::Work(std::shared_ptr<detail::WorkState> pending) : pending_(std::move(pending)) {}

Work& Work::operator=(Work&& other) noexcept {
  if (this != &other) {
    drop();
    pending_ = std::move(other.pending_);
  }
  return *this;
}

Work::~Work() { drop(); }

void Work::drop() noexcept {
  if (pending_ && (!pending_->settled() || (pending_->failed() && !pending_->heard()))) {
    // In a forked child the engine belongs to the parent: leak the operation.
    if (pending_->group().in_child())
      new std::shared_ptr(pending_);
    else
      pending_->group().adopt(pending_);
  }
  pending_.reset();
}

detail::WorkState& Work::pending() const {
  if (!pending_) throw Error("this Work was moved from: wait for the Work that it was moved to");
  return *pending_;
}

void Work::wait() { pending().wait(std::nullopt); }
void Work::wait(std::chrono::milliseconds timeout) { pending().wait(timeout); }
bool Work::done() { return pending().done(); }
std::optional<int> Work::source() const { return pending().source(); }
const Call& Work::call() const { return pending().call(); }

}  // namespace lockstep

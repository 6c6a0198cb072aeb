// The deadline of a call into an engine whose waits are a device's. NCCL connects two ranks inside the first
// call that has something to carry between them, and waits there for the other one: the deadline counts for
// that, too.
#pragma once

#include <atomic>

#include <lockstep/comm/group/work_state.h>

namespace lockstep::detail {

// As long as it lives, the call is under way.
class HostCall {
 public:
  HostCall(GroupState& group, Transport& engine, const WorkState& pending) {
    if (engine.traits().blocks_host || group.size() == 1 || engine.capturing()) return;
    call_ = c10::make_intrusive<UnderWay>();
    group.watch_device(call_, pending.call(), Clock::now(), pending.deadline());
  }
  ~HostCall() {
    if (call_) call_->over.store(true, std::memory_order_release);
  }
  HostCall(const HostCall&) = delete;
  HostCall& operator=(const HostCall&) = delete;

 private:
  struct UnderWay final : c10d::Work {
    bool isCompleted() override { return over.load(std::memory_order_acquire); }
    std::atomic<bool> over = false;
  };
  c10::intrusive_ptr<UnderWay> call_;
};

}  // namespace lockstep::detail

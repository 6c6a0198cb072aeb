// HostCall: a deadline for a call into an engine that otherwise waits only on the device. NCCL connects two
// ranks inside the first call that moves data between them and waits there for the peer. The deadline covers
// that wait too.
#pragma once

#include <atomic>

#include <lockstep/comm/group/work_state.h>

namespace lockstep::detail {

// The call is in progress while this object lives.
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

#include <lockstep/comm/group/refusal.h>

#include <lockstep/comm/c10d/tensors.h>
#include <lockstep/comm/group/group_state.h>
#include <lockstep/comm/group/work_state.h>

namespace lockstep::detail {

bool Refusal::possible(const Group& group) { return group.backend(at::kCPU) == "shm"; }

bool Refusal::group_lives(const Group& group) { return !group.state_->verdict(); }

void Refusal::next(Group& group, const std::string& text, Site site) {
  Call call;
  call.operation = Operation::barrier;
  call.site = group.site_.value_or(site);
  auto work = group.state_->issue(std::move(call), at::kCPU, {}, [&](Transport& engine, WorkState& pending) {
    pending.post_refusal(*engine.parts(), text);
  });
  try {
    work.wait();
  } catch (const CommError&) {
    if (!group_lives(group)) throw;
  }
}

}  // namespace lockstep::detail

// QueueWork: the c10d::Work for an OpQueue and for messages: the waiting thread does the work.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <lockstep/comm/c10d/engine_work.h>
#include <lockstep/comm/c10d/op_backend.h>
#include <lockstep/comm/transports/shm/engine/fork.h>
#include <lockstep/comm/transports/shm/engine/op_queue.h>

namespace lockstep::detail {

// Keeps the tensors of failed operations forever, because a peer may still read or write them. shared_only:
// only those in shared memory.
void abandon(std::vector<at::Tensor> tensors, bool shared_only);

// True if nothing was read or written.
inline bool was_refused(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Refused&) {
    return true;
  } catch (...) {
    return false;
  }
}

template <typename Engine>
class QueueWork : public EngineWork {
 public:
  using ItemPtr = std::shared_ptr<typename Engine::Item>;
  QueueWork(int rank, c10d::OpType type, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
            std::shared_ptr<Engine> engine, bool abandons_shared_only, const char* title = nullptr)
      : EngineWork(rank, type, std::move(inputs), std::move(outputs), title),
        engine_(std::move(engine)),
        abandons_shared_only_(abandons_shared_only) {}

  void set_item(ItemPtr item) { item_ = std::move(item); }
  virtual void settle_or_abandon(const std::exception_ptr& error, int source) {
    if (error && !was_refused(error)) abandon(tensors(), abandons_shared_only_);
    settle(error, source);
  }

  bool wait(std::chrono::milliseconds timeout) override {
    if (!isCompleted()) {
      TORCH_CHECK(shm::fork_generation() == generation_,
                  "a process that was forked from a rank cannot wait for the rank's operations");
      const auto limit = timeout > std::chrono::milliseconds(0)
                             ? timeout
                             : std::chrono::milliseconds(std::chrono::hours(24 * 365));
      Waiting here;
      engine_->wait(*item_, AwakeClock::now() + limit);
    }
    return EngineWork::wait(kNoTimeout);
  }

 private:
  const std::shared_ptr<Engine> engine_;
  const std::uint64_t generation_ = shm::fork_generation();
  const bool abandons_shared_only_;
  ItemPtr item_;
};

struct QueueItem final : OpItem {
  c10::intrusive_ptr<QueueWork<shm::OpQueue>> work;
  void done(const std::exception_ptr& error, int source) override {
    std::exchange(work, {})->settle_or_abandon(error, source);
  }
};

// Posts a collective to the queue; its completion settles the work.
inline void post_to(shm::OpQueue& op_queue, const c10::intrusive_ptr<QueueWork<shm::OpQueue>>& work, Op op,
                    std::chrono::milliseconds timeout, bool soon) {
  auto item = std::make_shared<QueueItem>();
  item->op = std::move(op);
  item->work = work;
  work->set_item(item);
  item->start(timeout);
  op_queue.post(std::move(item), soon);
}

}  // namespace lockstep::detail

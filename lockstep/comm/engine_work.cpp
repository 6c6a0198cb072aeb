#include <lockstep/comm/engine_work.h>

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

namespace lockstep::detail {

EngineWork::EngineWork(int rank, c10d::OpType type, std::vector<at::Tensor> keep,
                       std::vector<at::Tensor> outputs)
    : Work(rank, type), keep_(std::move(keep)), outputs_(std::move(outputs)) {}

void EngineWork::complete(std::exception_ptr error, int source) {
  source_ = source;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard lock(future_mutex_);
    ended_ = true;
    error_ = error;
    future = future_;
    keep_.clear();
  }
  finish(error);
  if (!future) return;
  if (error)
    future->setError(error);
  else
    future->markCompleted(c10::IValue(outputs_));
}

c10::intrusive_ptr<c10::ivalue::Future> EngineWork::getFuture() {
  std::unique_lock lock(future_mutex_);
  if (future_) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  auto future = future_;
  const bool ended = ended_;
  lock.unlock();
  if (ended) {
    if (error_)
      future->setError(error_);
    else
      future->markCompleted(c10::IValue(outputs_));
  }
  return future;
}

}  // namespace lockstep::detail

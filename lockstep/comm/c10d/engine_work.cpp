#include <lockstep/comm/c10d/engine_work.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <lockstep/base/log.h>
#include <lockstep/base/quiet_threads.h>
#include <lockstep/comm/engine/op.h>

namespace lockstep::detail {

namespace {

thread_local int waiting = 0;

}  // namespace

EngineWork::EngineWork(int rank, c10d::OpType type, std::vector<at::Tensor> inputs,
                       std::vector<at::Tensor> outputs, const char* title)
    : Work(rank, type, title, title != nullptr ? std::optional(inputs) : std::nullopt),
      inputs_(std::move(inputs)),
      outputs_(std::move(outputs)) {}

int EngineWork::sourceRank() const {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(completed_ && source_ >= 0, "sourceRank() is available only for completed receives");
  return source_;
}

c10::intrusive_ptr<c10::ivalue::Future> EngineWork::getFuture() {
  std::unique_lock lock(mutex_);
  if (future_) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  const auto future = future_;
  const bool completed = completed_;
  lock.unlock();
  if (completed) resolve(*future);
  return future;
}

void EngineWork::resolve(c10::ivalue::Future& future) const {
  if (exception_)
    future.setError(exception_);
  else
    future.markCompleted(c10::IValue(c10::List<at::Tensor>(outputs_)));
}

void EngineWork::settle(std::exception_ptr error, int source) noexcept {
  try {
    if (!error && finish_) finish_();
  } catch (...) {
    error = std::current_exception();
  }
  finish_ = nullptr;
  try {
    if (error && explain_) error = explain_(error);
  } catch (...) {  // then report the original error
  }
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard lock(mutex_);
    if (completed_) return;
    completed_ = true;
    exception_ = std::move(error);
    source_ = source;
    future = future_;
    if (recordFunctionEndCallback_) std::exchange(recordFunctionEndCallback_, nullptr)();
  }
  cv_.notify_all();
  if (!future) return;
  auto self = c10::intrusive_ptr<EngineWork>::unsafe_reclaim_from_nonowning(this);
  if (waiting == 0) return tell(self, *future);
  try {
    auto settling = std::make_unique<Settling>();
    const QuietThreads quiet;
    std::thread([self, future, settling = std::move(settling)]() mutable {
      tell(self, *future);
      future.reset();
      self.reset();
      settling.reset();
    }).detach();
  } catch (...) {  // no thread can be started
    tell(self, *future);
  }
}

// Runs the caller's callbacks.
void EngineWork::tell(const c10::intrusive_ptr<EngineWork>& work, c10::ivalue::Future& future) noexcept {
  try {
    work->resolve(future);
  } catch (const std::exception& problem) {
    log(LogLevel::error, "a callback of an operation threw an exception: {}", problem.what());
  } catch (...) {
    log(LogLevel::error, "a callback of an operation threw an exception that is not a std::exception");
  }
}

EngineWork::Waiting::Waiting() { ++waiting; }
EngineWork::Waiting::~Waiting() { --waiting; }

std::vector<at::Tensor> EngineWork::tensors() const {
  auto all = inputs_;
  all.insert(all.end(), outputs_.begin(), outputs_.end());
  return all;
}

bool JoinedWork::isCompleted() {
  return std::all_of(parts_.begin(), parts_.end(), [](const auto& op) { return op->isCompleted(); });
}

bool JoinedWork::isSuccess() const { return !exception(); }

std::exception_ptr JoinedWork::exception() const {
  for (const auto& op : parts_)
    if (auto error = op->exception()) return error;
  return nullptr;
}

bool JoinedWork::wait(std::chrono::milliseconds timeout) {
  for (const auto& op : parts_) op->wait(timeout);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> JoinedWork::getFuture() {
  const auto type = c10::ListType::create(c10::TensorType::get());
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(c10::FutureType::create(type));
  for (const auto& op : parts_) futures.push_back(op->getFuture());
  return c10::collectAll(futures)->then(
      [results = results_](c10::ivalue::Future& all) {
        all.value();  // throws the error of the work that failed
        return c10::IValue(c10::List<at::Tensor>(results));
      },
      type);
}

}  // namespace lockstep::detail

// EngineWork: the c10d::Work of Lockstep's own engines.
#pragma once

#include <functional>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace lockstep::detail {

class EngineWork : public c10d::Work {
 public:
  // Keeps the tensors until it is destroyed: the outputs for result(), and both because an engine may still
  // write to them after the operation was abandoned.
  // title: name of its row in PyTorch's profiler; null for no row.
  EngineWork(int rank, c10d::OpType type, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
             const char* title = nullptr);

  // Call it before the operation is posted. finish runs after success, before completion is visible. explain
  // turns a failure into the error for the caller. Either may be null.
  void prepare(std::function<void()> finish, std::function<std::exception_ptr(std::exception_ptr)> explain) {
    finish_ = std::move(finish);
    explain_ = std::move(explain);
  }

  // Completes the work; only the first call counts. Wakes the waiters. Thread-safe. source: the sender of a
  // receive.
  void settle(std::exception_ptr error, int source = -1) noexcept;

  // Lives while a thread waits in an engine, where it may settle works of other threads. Callbacks of those
  // works are not run on this thread, because they may wait for it.
  class Waiting {
   public:
    Waiting();
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
  };

  std::vector<at::Tensor> tensors() const;  // inputs and outputs
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void resolve(c10::ivalue::Future& future) const;
  static void tell(const c10::intrusive_ptr<EngineWork>& work, c10::ivalue::Future& future) noexcept;

  const std::vector<at::Tensor> inputs_, outputs_;
  std::function<void()> finish_;
  std::function<std::exception_ptr(std::exception_ptr)> explain_;
  int source_ = -1;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // created on request: most works never need it
};

// Several works as one.
class JoinedWork final : public c10d::Work {
 public:
  using Parts = std::vector<c10::intrusive_ptr<c10d::Work>>;
  JoinedWork(int rank, c10d::OpType type, Parts parts, std::vector<at::Tensor> results)
      : Work(rank, type), parts_(std::move(parts)), results_(std::move(results)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const Parts parts_;
  const std::vector<at::Tensor> results_;
};

}  // namespace lockstep::detail

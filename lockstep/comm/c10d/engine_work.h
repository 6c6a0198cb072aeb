// The c10d::Work of our own engines.
#pragma once

#include <functional>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace lockstep::detail {

class EngineWork : public c10d::Work {
 public:
  // Tensors are kept until the work is destroyed: the outputs for result(), both for an engine that may
  // write to them after the work was given up.
  // title: of its row in PyTorch's profiler; null: it has none.
  EngineWork(int rank, c10d::OpType type, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
             const char* title = nullptr);

  // Before it is posted. finish: done after success, before anybody hears of it. explain: what a failure is
  // to its caller. Either may be null.
  void prepare(std::function<void()> finish, std::function<std::exception_ptr(std::exception_ptr)> explain) {
    finish_ = std::move(finish);
    explain_ = std::move(explain);
  }

  // The first call decides; wakes the waiters. Any thread. source: of a receive.
  void settle(std::exception_ptr error, int source = -1) noexcept;

  // While a thread waits in an engine, and so may come to settle works of others: their callbacks, which may
  // wait for that very thread, are not run on it.
  class Waiting {
   public:
    Waiting();
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
  };

  std::vector<at::Tensor> tensors() const;  // all of them
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
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when asked for: most never are
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

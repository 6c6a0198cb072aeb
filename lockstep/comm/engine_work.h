// The c10d::Work of our own engines.
#pragma once

#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace lockstep::detail {

class EngineWork : public c10d::Work {
 public:
  // Tensors are kept until the work is destroyed: the outputs for result(), both for an engine that may
  // write to them after the work was given up.
  EngineWork(int rank, c10d::OpType type, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs);

  // The first call decides; wakes the waiters. Any thread. source: of a receive.
  void settle(std::exception_ptr error, int source = -1) noexcept;

  std::vector<at::Tensor> tensors() const;  // all of them
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void resolve(c10::ivalue::Future& future) const;

  const std::vector<at::Tensor> inputs_, outputs_;
  int source_ = -1;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when asked for: most never are
};

}  // namespace lockstep::detail

// The c10d::Work of our own engines.
#pragma once

#include <mutex>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace lockstep::detail {

class EngineWork : public c10d::Work {
 public:
  // keep: tensors that live until completion; outputs: what the future carries.
  EngineWork(int rank, c10d::OpType type, std::vector<at::Tensor> keep, std::vector<at::Tensor> outputs);

  // Once, by any thread.
  void complete(std::exception_ptr error, int source = -1);

  int sourceRank() const override { return source_; }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when asked for: most never are
  bool ended_ = false;
  std::exception_ptr error_;
  int source_ = -1;
  std::vector<at::Tensor> keep_, outputs_;
};

}  // namespace lockstep::detail

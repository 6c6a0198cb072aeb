// OpBackend: turns c10d's calls into Ops. The common base of Lockstep's engines as c10d::Backends.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <lockstep/comm/engine/op.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace lockstep::detail {

class OpBackend : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Backend::Backend;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  // Returns when it is done: the size of the peers' data is known only once they have sent it.
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions&) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions&) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions&) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override;
  WorkPtr barrier(const c10d::BarrierOptions&) override;
  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  void setSequenceNumberForGroup() override {}  // all ranks begin with 0
  std::uint64_t getSequenceNumberForGroup() override { return sequence_; }

 protected:
  struct Request {
    Op op{};  // without `done`
    c10d::OpType type = c10d::OpType::UNKNOWN;
    Tensors keep{};                  // the memory that op points into
    Tensors results{};               // as the caller passed them
    std::function<void()> finish{};  // runs after success, before completion is visible; may be null
    // turns a failure into the caller's error; may be null
    std::function<std::exception_ptr(std::exception_ptr)> explain{};
    int tag = 0;                          // of a message
    std::chrono::milliseconds timeout{};  // 0: none was given
    bool asynchronous = true;             // false if the caller waits at once
  };
  virtual WorkPtr post(Request request) = 0;
  // True if a receive accepts a message shorter than its tensor.
  virtual bool takes_less() const { return false; }
  // Device whose memory the engine accepts.
  virtual at::Device device() const { return at::kCPU; }
  // Fails a call in which this rank finds an error before anything has happened; throws the caller's error.
  // The default throws the error itself and does not notify the peers, which then wait for this rank.
  [[noreturn]] virtual void refuse(Operation operation, std::chrono::milliseconds timeout,
                                   const std::exception_ptr& error);
  // Joins a collective with only the text of a refusal, which the peers get. Shared memory only.
  void post_refusal(Operation operation, std::chrono::milliseconds timeout, std::string text);
  // Request::explain for this call.
  virtual std::function<std::exception_ptr(std::exception_ptr)> explanation(const Call&) { return nullptr; }

 private:
  class Operands;
  template <typename Body>
  void attempt(Operation operation, std::chrono::milliseconds timeout, Body body);
  Call describe(Operation operation, const Tensors& inputs, const Tensors& outputs, ReduceOp reduction,
                int root);
  // give: passes the call's tensors to Operands.
  template <typename CallOptions, typename Give>
  WorkPtr start(Operation operation, c10d::OpType type, const CallOptions& options, Give give,
                const c10d::ReduceOp& reduction = c10d::ReduceOp::SUM, std::int64_t root = -1);
  // Several calls as one: start_one(i) for each. A rank that refuses one of them still takes part in the
  // others.
  template <typename StartOne>
  WorkPtr start_several(c10d::OpType type, std::size_t count, Tensors results, StartOne start_one);
  WorkPtr post_numbered(Request request);
  WorkPtr start_message(Operation operation, c10d::OpType type, const Tensors& tensors, int peer, int tag);
  Request request(Operation operation, c10d::OpType type, Operands& operands, ReduceOp reduction,
                  std::int64_t root);

  std::atomic<std::uint64_t> sequence_ = 0, messages_ = 0;  // of calls made through c10d directly
};

}  // namespace lockstep::detail

// MpiBackend: c10d's interface over MPI, for dense contiguous CPU tensors. Every operation is asynchronous;
// operations of one group start in the order of the calls.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <lockstep/comm/transports/mpi/module/datatypes.h>
#include <lockstep/comm/transports/mpi/module/work.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace lockstep::detail {

class MpiBackend final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  explicit MpiBackend(std::shared_ptr<MpiLink> link);

  const std::string getBackendName() const override { return "mpi"; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  // Lists may hold tensors of unequal sizes. Cost is linear in the ranks; _allgather_base uses MPI's own
  // algorithm.
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 private:
  using Stages = std::deque<MpiWork::Stage>;

  WorkPtr submit(c10d::OpType type, Tensors outputs, Tensors inputs, Stages stages);
  WorkPtr all_reduce(c10d::OpType type, const Tensors& tensors, const c10d::ReduceOp& op);
  WorkPtr reduce_scatter_list(c10d::OpType type, const at::Tensor& output, Tensors inputs,
                              const c10d::ReduceOp& op);
  WorkPtr receive(c10d::OpType type, const Tensors& tensors, int peer, int tag);
  // outputs[r] comes from rank r and inputs[r] goes to rank r. An undefined or empty tensor means no message.
  MpiWork::Stage exchange(const Tensors& outputs, const Tensors& inputs) const;
  void check_root(std::int64_t root) const;
  void check_peer(int peer, int tag) const;

  const std::shared_ptr<MpiLink> link_;
};

}  // namespace lockstep::detail

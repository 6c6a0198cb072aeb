// The local transport, for a group of one: every collective is a copy, or nothing. Any device.
#include <ATen/ATen.h>
#include <lockstep/comm/c10d/engine_work.h>
#include <lockstep/comm/c10d/transport.h>
#include <lockstep/comm/reduce/reduce.h>

namespace lockstep::detail {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

class LocalBackend final : public c10d::Backend {
 public:
  LocalBackend() : Backend(0, 1) { init(); }
  const std::string getBackendName() const override { return "local"; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions&) override { return done(tensors); }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions&) override { return done(tensors); }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions&) override { return done(tensors); }
  WorkPtr barrier(const c10d::BarrierOptions&) override { return done({}); }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions&) override {
    return copied(out.at(0).at(0), in.at(0));
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions&) override {
    return copied(out, in);
  }
  WorkPtr gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions&) override {
    return copied(out.at(0).at(0), in.at(0));
  }
  WorkPtr scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions&) override {
    return copied(out.at(0), in.at(0).at(0));
  }
  WorkPtr reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions&) override {
    return copied(out.at(0), in.at(0).at(0));
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions&) override {
    return copied(out, in);
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<std::int64_t>&,
                        std::vector<std::int64_t>&, const c10d::AllToAllOptions&) override {
    return copied(out, in);
  }

 private:
  WorkPtr copied(at::Tensor& out, const at::Tensor& in) {
    out.view({-1}).copy_(in.view({-1}));
    return done({out});
  }
  WorkPtr done(const Tensors& outputs) {
    auto work = c10::make_intrusive<EngineWork>(0, c10d::OpType::UNKNOWN, Tensors{}, outputs);
    work->settle(nullptr);
    return work;
  }
};

class LocalTransport final : public Transport {
 public:
  Traits traits() const override {
    return {.avg = true, .unequal = true, .any_dtype = true, .compares_calls = true, .keeps_inputs = true};
  }
  c10d::Backend& backend() override { return *backend_; }
  bool reduces(Dtype dtype, ReduceOp op) const override { return reducible(dtype, op); }
  void interrupt(const std::string&, CommError::Kind) noexcept override {}  // there are no waiters

 private:
  const c10::intrusive_ptr<LocalBackend> backend_ = c10::make_intrusive<LocalBackend>();
};

}  // namespace

std::unique_ptr<Transport> make_local_transport(const TransportContext&) {
  return std::make_unique<LocalTransport>();
}

}  // namespace lockstep::detail

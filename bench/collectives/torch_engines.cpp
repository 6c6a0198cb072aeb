#include "torch_engines.h"

#include <functional>
#include <numeric>

#include <ATen/ATen.h>
#include <lockstep/comm/c10d/transport.h>
#include <lockstep/lockstep.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

namespace lockstep::bench {
namespace {

// Separate tensors for each operation of a batch.
class TensorEngine : public Engine {
 public:
  Memory prepare(const Order& order, const Sizes& sizes) override {
    release();
    op_ = order.op;
    const auto type = order.type == Type::float32 ? at::kFloat : at::kBFloat16;
    auto make = [&](std::int64_t elements, std::int64_t stride, std::vector<at::Tensor>& parts) -> void* {
      if (elements == 0) {
        parts.assign(static_cast<std::size_t>(order.batch), at::Tensor());
        return nullptr;
      }
      const auto whole =
          order.allocated ? allocate(stride * order.batch, type) : at::empty({stride * order.batch}, type);
      whole.zero_();  // Faults the pages in.
      for (int i = 0; i < order.batch; ++i) parts.push_back(whole.narrow(0, i * stride, elements));
      return whole.data_ptr();
    };
    return {make(sizes.in, sizes.in_stride, in_), make(sizes.out, sizes.out_stride, out_)};
  }

  void run(int i) override {
    const auto place = static_cast<std::size_t>(i);
    run(op_, in_[place], out_[place], i);
  }

  void release() override { in_.clear(), out_.clear(); }

 protected:
  virtual at::Tensor allocate(std::int64_t elements, at::ScalarType type) = 0;
  virtual void run(Op op, at::Tensor& in, at::Tensor& out, int i) = 0;

 private:
  Op op_ = Op::barrier;
  std::vector<at::Tensor> in_, out_;
};

class GroupEngine final : public TensorEngine {
 public:
  explicit GroupEngine(const std::string& backend)
      : world_(World::from_environment({.backend = backend})), group_(world_.group()) {}
  int rank() const override { return group_.rank(); }

 private:
  at::Tensor allocate(std::int64_t elements, at::ScalarType type) override {
    return group_.allocate({elements}, type);
  }
  void run(Op op, at::Tensor& in, at::Tensor& out, int i) override {
    switch (op) {
      case Op::all_reduce: group_.all_reduce(in).wait(); break;
      case Op::reduce_scatter: group_.reduce_scatter(out, in).wait(); break;
      case Op::all_gather: group_.all_gather(out, in).wait(); break;
      case Op::broadcast: group_.broadcast(in, {.root = i % group_.size()}).wait(); break;
      case Op::all_to_all: group_.all_to_all(out, in).wait(); break;
      case Op::barrier: group_.barrier().wait(); break;
    }
  }

  World world_;
  Group group_;
};

class GlooEngine final : public TensorEngine {
 public:
  GlooEngine(int rank, int ranks, const std::string& store) : rank_(rank), ranks_(ranks) {
    lockstep::detail::TransportContext context;
    context.group = "bench";
    context.ranks.resize(static_cast<std::size_t>(ranks));
    std::iota(context.ranks.begin(), context.ranks.end(), 0);
    context.rank = rank;
    context.world_size = ranks;
    context.store = c10::make_intrusive<c10d::FileStore>(store, ranks);
    context.timeout = std::chrono::minutes(5);
    transport_ = lockstep::detail::make_gloo_transport(context);
  }
  int rank() const override { return rank_; }

 private:
  at::Tensor allocate(std::int64_t elements, at::ScalarType type) override {
    return at::empty({elements}, type);
  }
  void run(Op op, at::Tensor& in, at::Tensor& out, int i) override {
    auto& gloo = transport_->backend();
    std::vector<at::Tensor> tensors{in};
    std::vector<std::int64_t> equal_parts;
    switch (op) {
      case Op::all_reduce: gloo.allreduce(tensors)->wait(); break;
      case Op::reduce_scatter: gloo._reduce_scatter_base(out, in)->wait(); break;
      case Op::all_gather: gloo._allgather_base(out, in)->wait(); break;
      case Op::broadcast: {
        c10d::BroadcastOptions options;
        options.rootRank = i % ranks_;
        gloo.broadcast(tensors, options)->wait();
        break;
      }
      case Op::all_to_all: gloo.alltoall_base(out, in, equal_parts, equal_parts)->wait(); break;
      case Op::barrier: gloo.barrier()->wait(); break;
    }
  }

  const int rank_, ranks_;
  std::unique_ptr<lockstep::detail::Transport> transport_;
};

}  // namespace

std::unique_ptr<Engine> make_group_engine(const std::string& backend) {
  return std::make_unique<GroupEngine>(backend);
}

std::unique_ptr<Engine> make_gloo_engine(int rank, int ranks, const std::string& store) {
  return std::make_unique<GlooEngine>(rank, ranks, store);
}

}  // namespace lockstep::bench

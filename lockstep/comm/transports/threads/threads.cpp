#include <lockstep/comm/transports/threads/threads.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/engine_work.h>
#include <lockstep/comm/reduce.h>
#include <lockstep/comm/stop.h>
#include <lockstep/comm/tensors.h>

namespace lockstep::detail {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

class ThreadsBackend final : public c10d::Backend {
 public:
  ThreadsBackend(std::shared_ptr<Hub> hub, int rank, int size) : Backend(rank, size), hub_(std::move(hub)) {
    init();
  }
  ~ThreadsBackend() override { hub_->leave(rank_); }

  Hub& hub() { return *hub_; }
  const std::string getBackendName() const override { return "threads"; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return in_place(Operation::all_reduce, c10d::OpType::ALLREDUCE, tensors, from_c10d(options.reduceOp), -1);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return in_place(Operation::reduce, c10d::OpType::REDUCE, tensors, from_c10d(options.reduceOp),
                    options.rootRank);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return in_place(Operation::broadcast, c10d::OpType::BROADCAST, tensors, ReduceOp::SUM, options.rootRank);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return post(Operation::all_gather, c10d::OpType::ALLGATHER, inputs, outputs.at(0));
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    return post(Operation::all_gather, c10d::OpType::_ALLGATHER_BASE, {input}, equal_parts(output));
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    return post(Operation::gather, c10d::OpType::GATHER, inputs, outputs.empty() ? Tensors{} : outputs.at(0),
                ReduceOp::SUM, options.rootRank);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    return post(Operation::scatter, c10d::OpType::SCATTER, inputs.empty() ? Tensors{} : inputs.at(0), outputs,
                ReduceOp::SUM, options.rootRank);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return post(Operation::reduce_scatter, c10d::OpType::REDUCE_SCATTER, inputs.at(0), outputs,
                from_c10d(options.reduceOp));
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return post(Operation::reduce_scatter, c10d::OpType::_REDUCE_SCATTER_BASE, equal_parts(input), {output},
                from_c10d(options.reduceOp));
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions&) override {
    auto parts = [&](const at::Tensor& tensor, const std::vector<std::int64_t>& splits) {
      return splits.empty() ? equal_parts(tensor) : Tensors(tensor.split_with_sizes(splits));
    };
    return post(Operation::all_to_all, c10d::OpType::ALLTOALL_BASE, parts(input, input_splits),
                parts(output, output_splits));
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    return post(Operation::all_to_all, c10d::OpType::ALLTOALL, inputs, outputs);
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    return post(Operation::barrier, c10d::OpType::BARRIER, {}, {});
  }
  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    return post_message(Operation::send, c10d::OpType::SEND, tensors, peer, tag);
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    return post_message(Operation::recv, c10d::OpType::RECV, tensors, peer, tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return post_message(Operation::recv, c10d::OpType::RECVANYSOURCE, tensors, kAnySource, tag);
  }

 private:
  Tensors equal_parts(const at::Tensor& tensor) const {
    auto flat = tensor.view({-1});
    return flat.split_with_sizes(
        std::vector<std::int64_t>(static_cast<std::size_t>(size_), flat.numel() / size_));
  }

  // The call as Group describes it, or as c10d's arguments tell.
  Call describe(Operation operation, const Tensors& inputs, const Tensors& outputs, ReduceOp reduction,
                int root) {
    if (const Call* call = current_call()) return *call;
    const bool by_output =
        operation == Operation::scatter || operation == Operation::reduce_scatter || inputs.empty();
    const Tensors& own = by_output ? outputs : inputs;
    Call call = describe_call(operation, own.empty() ? at::Tensor() : own[0], Site::current());
    call.far_site = "a c10d call";
    call.reduction = reduction;
    call.root = root;
    call.rank = rank_;
    call.size = size_;
    call.group = getGroupDesc();
    call.sequence = sequence_++;
    auto counts = [](const Tensors& tensors) {
      std::vector<std::int64_t> result;
      for (const auto& tensor : tensors) result.push_back(tensor.numel());
      return result;
    };
    const bool is_root = root == rank_;
    if (operation == Operation::reduce_scatter || operation == Operation::all_to_all ||
        (operation == Operation::scatter && is_root))
      call.to = counts(inputs);
    if (operation == Operation::all_gather || operation == Operation::all_to_all ||
        (operation == Operation::gather && is_root))
      call.from = counts(outputs);
    return call;
  }

  WorkPtr in_place(Operation operation, c10d::OpType type, Tensors& tensors, ReduceOp reduction,
                   std::int64_t root) {
    TORCH_CHECK(tensors.size() == 1, "the threads transport takes one tensor a call, not ", tensors.size());
    return post(operation, type, {}, tensors, reduction, root);
  }

  c10::intrusive_ptr<EngineWork> prepare(Part& part, Operation operation, c10d::OpType type,
                                         const Tensors& inputs, const Tensors& outputs, ReduceOp reduction,
                                         std::int64_t root) {
    for (const auto* tensors : {&inputs, &outputs})
      for (const auto& tensor : *tensors) {
        TORCH_CHECK(tensor.is_contiguous() && tensor.is_cpu(),
                    "the threads transport takes dense CPU tensors");
        part.item_size = tensor.element_size();
      }
    part.call = describe(operation, inputs, outputs, reduction, static_cast<int>(root));
    if (reduces(operation))
      TORCH_CHECK(reducible(part.call.dtype, part.call.reduction), "no ", name(part.call.reduction), " of ",
                  name(part.call.dtype));
    for (const auto& tensor : inputs) part.inputs.push_back(tensor.const_data_ptr());
    for (const auto& tensor : outputs) part.outputs.push_back(tensor.mutable_data_ptr());
    auto work = c10::make_intrusive<EngineWork>(rank_, type, inputs, outputs);
    part.done = [work](const std::exception_ptr& error, int source) { work->settle(error, source); };
    return work;
  }

  WorkPtr post(Operation operation, c10d::OpType type, const Tensors& inputs, const Tensors& outputs,
               ReduceOp reduction = ReduceOp::SUM, std::int64_t root = -1) {
    Part part;
    auto work = prepare(part, operation, type, inputs, outputs, reduction, root);
    hub_->post(rank_, std::move(part));
    return work;
  }

  WorkPtr post_message(Operation operation, c10d::OpType type, const Tensors& tensors, int peer, int tag) {
    Part part;
    const bool sends = operation == Operation::send;
    auto work = prepare(part, operation, type, sends ? tensors : Tensors{}, sends ? Tensors{} : tensors,
                        ReduceOp::SUM, peer);
    hub_->post_point_to_point(rank_, tag, std::move(part));
    return work;
  }

  const std::shared_ptr<Hub> hub_;
  std::uint64_t sequence_ = 0;
};

class ThreadsTransport final : public Transport {
 public:
  ThreadsTransport(const TransportContext& context, std::shared_ptr<Hub> hub)
      : backend_(c10::make_intrusive<ThreadsBackend>(std::move(hub), context.rank, context.size())) {}

  Traits traits() const override {
    return {.avg = true, .unequal = true, .any_dtype = true, .compares_calls = true, .keeps_inputs = true};
  }
  c10d::Backend& backend() override { return *backend_; }
  bool reduces(Dtype dtype, ReduceOp op) const override { return reducible(dtype, op); }
  void interrupt(const std::string& cause) noexcept override {
    try {
      backend_->hub().poison(cause);
    } catch (...) {  // out of memory while waking: the deadline remains
    }
  }
  void leave() noexcept override { backend_->hub().leave(backend_->getRank()); }
  std::string absent(std::uint64_t sequence) override { return backend_->hub().absent(sequence); }

 private:
  const c10::intrusive_ptr<ThreadsBackend> backend_;
};

}  // namespace

ThreadsJob::ThreadsJob(int size)
    : whereabouts_(std::make_shared<Whereabouts>(size)),
      store_(std::make_shared<control::LocalStore>()),
      stop_counts_(static_cast<std::size_t>(size)) {}

bool ThreadsJob::stop_requested(int rank) {
  std::lock_guard lock(mutex_);
  auto& count = stop_counts_[static_cast<std::size_t>(rank)];
  if (!stop_at_ && stop_signal_came()) stop_at_ = *std::max_element(stop_counts_.begin(), stop_counts_.end());
  if (stop_at_ && count >= *stop_at_) return true;
  ++count;
  return false;
}

std::shared_ptr<Hub> ThreadsJob::hub(const std::string& group, const std::vector<int>& ranks) {
  std::lock_guard lock(mutex_);
  auto& hub = hubs_[group];
  if (!hub) hub = std::make_shared<Hub>(ranks, whereabouts_);
  LOCKSTEP_ASSERT(hub->ranks() == ranks, "two groups of one name");
  return hub;
}

std::unique_ptr<Transport> make_threads_transport(const TransportContext& context, ThreadsJob& job) {
  return std::make_unique<ThreadsTransport>(context, job.hub(context.group, context.ranks));
}

}  // namespace lockstep::detail

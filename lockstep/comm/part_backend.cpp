#include <lockstep/comm/part_backend.h>

#include <ATen/ATen.h>
#include <lockstep/comm/reduce.h>
#include <lockstep/comm/tensors.h>

namespace lockstep::detail {

using c10d::OpType;
using WorkPtr = PartBackend::WorkPtr;
using Tensors = PartBackend::Tensors;

namespace {

const at::Tensor& only(const Tensors& tensors) {
  TORCH_CHECK(tensors.size() == 1, "this transport takes one tensor a call, not ", tensors.size());
  return tensors[0];
}

Tensors first_of(const std::vector<Tensors>& tensors) { return tensors.empty() ? Tensors{} : tensors[0]; }

}  // namespace

WorkPtr PartBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return start(Operation::all_reduce, OpType::ALLREDUCE, {}, {only(tensors)}, options,
               from_c10d(options.reduceOp));
}

WorkPtr PartBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return start(Operation::reduce, OpType::REDUCE, {}, {only(tensors)}, options, from_c10d(options.reduceOp),
               options.rootRank);
}

WorkPtr PartBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return start(Operation::broadcast, OpType::BROADCAST, {}, {only(tensors)}, options, ReduceOp::SUM,
               options.rootRank);
}

WorkPtr PartBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                               const c10d::AllgatherOptions& options) {
  return start(Operation::all_gather, OpType::ALLGATHER, {only(inputs)}, first_of(outputs), options);
}

WorkPtr PartBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                     const c10d::AllgatherOptions& options) {
  return start(Operation::all_gather, OpType::_ALLGATHER_BASE, {input}, equal_parts(output), options);
}

WorkPtr PartBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                            const c10d::GatherOptions& options) {
  return start(Operation::gather, OpType::GATHER, {only(inputs)}, first_of(outputs), options, ReduceOp::SUM,
               options.rootRank);
}

WorkPtr PartBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                             const c10d::ScatterOptions& options) {
  return start(Operation::scatter, OpType::SCATTER, first_of(inputs), {only(outputs)}, options, ReduceOp::SUM,
               options.rootRank);
}

WorkPtr PartBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                    const c10d::ReduceScatterOptions& options) {
  return start(Operation::reduce_scatter, OpType::REDUCE_SCATTER, first_of(inputs), {only(outputs)}, options,
               from_c10d(options.reduceOp));
}

WorkPtr PartBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::ReduceScatterOptions& options) {
  return start(Operation::reduce_scatter, OpType::_REDUCE_SCATTER_BASE, equal_parts(input), {output}, options,
               from_c10d(options.reduceOp));
}

WorkPtr PartBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                   std::vector<std::int64_t>& output_splits,
                                   std::vector<std::int64_t>& input_splits,
                                   const c10d::AllToAllOptions& options) {
  auto parts = [&](const at::Tensor& tensor, const std::vector<std::int64_t>& splits) {
    return splits.empty() ? equal_parts(tensor) : Tensors(tensor.split_with_sizes(splits));
  };
  return start(Operation::all_to_all, OpType::ALLTOALL_BASE, parts(input, input_splits),
               parts(output, output_splits), options);
}

WorkPtr PartBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return start(Operation::all_to_all, OpType::ALLTOALL, inputs, outputs, options);
}

WorkPtr PartBackend::barrier(const c10d::BarrierOptions& options) {
  return start(Operation::barrier, OpType::BARRIER, {}, {}, options);
}

WorkPtr PartBackend::send(Tensors& tensors, int peer, int tag) {
  return start_message(Operation::send, OpType::SEND, tensors, peer, tag);
}

WorkPtr PartBackend::recv(Tensors& tensors, int peer, int tag) {
  return start_message(Operation::recv, OpType::RECV, tensors, peer, tag);
}

WorkPtr PartBackend::recvAnysource(Tensors& tensors, int tag) {
  return start_message(Operation::recv, OpType::RECVANYSOURCE, tensors, kAnySource, tag);
}

Tensors PartBackend::equal_parts(const at::Tensor& tensor) const {
  auto flat = tensor.view({-1});
  return flat.split_with_sizes(
      std::vector<std::int64_t>(static_cast<std::size_t>(size_), flat.numel() / size_));
}

// The call as Group describes it, or as c10d's arguments tell.
Call PartBackend::describe(Operation operation, const Tensors& inputs, const Tensors& outputs,
                           ReduceOp reduction, int root) {
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

PartBackend::Request PartBackend::request(Operation operation, OpType type, Tensors inputs, Tensors outputs,
                                          ReduceOp reduction, std::int64_t root) {
  Request request{.part = {}, .type = type, .inputs = std::move(inputs), .outputs = std::move(outputs)};
  Part& part = request.part;
  for (const auto* tensors : {&request.inputs, &request.outputs})
    for (const auto& tensor : *tensors) {
      TORCH_CHECK(tensor.is_contiguous() && tensor.is_cpu(), "this transport takes dense CPU tensors");
      part.item_size = tensor.element_size();
    }
  part.call = describe(operation, request.inputs, request.outputs, reduction, static_cast<int>(root));
  if (reduces(operation))
    TORCH_CHECK(reducible(part.call.dtype, part.call.reduction), "no ", name(part.call.reduction), " of ",
                name(part.call.dtype));
  for (const auto& tensor : request.inputs) part.inputs.push_back(tensor.const_data_ptr());
  for (const auto& tensor : request.outputs) part.outputs.push_back(tensor.mutable_data_ptr());
  return request;
}

template <typename CallOptions>
WorkPtr PartBackend::start(Operation operation, OpType type, Tensors inputs, Tensors outputs,
                           const CallOptions& options, ReduceOp reduction, std::int64_t root) {
  auto wanted = request(operation, type, std::move(inputs), std::move(outputs), reduction, root);
  if (options.timeout > std::chrono::milliseconds(0)) wanted.timeout = options.timeout;
  wanted.asynchronous = options.asyncOp && current_call() == nullptr;  // Group's calls are mostly waited for
  return post(std::move(wanted));
}

WorkPtr PartBackend::start_message(Operation operation, OpType type, const Tensors& tensors, int peer,
                                   int tag) {
  const bool sends = operation == Operation::send;
  const Tensors own{only(tensors)};
  auto wanted =
      request(operation, type, sends ? own : Tensors{}, sends ? Tensors{} : own, ReduceOp::SUM, peer);
  wanted.tag = tag;
  return post(std::move(wanted));
}

}  // namespace lockstep::detail

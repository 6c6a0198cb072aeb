#include <lockstep/comm/c10d/op_backend.h>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <lockstep/comm/c10d/engine_work.h>
#include <lockstep/comm/c10d/op_checks.h>
#include <lockstep/comm/c10d/tensors.h>

namespace lockstep::detail {

using c10d::OpType;
using WorkPtr = OpBackend::WorkPtr;
using Tensors = OpBackend::Tensors;

namespace {

Tensors first_of(const std::vector<Tensors>& tensors) { return tensors.empty() ? Tensors{} : tensors[0]; }

}  // namespace

// A call's tensors in dense form, as the engine takes them. Non-dense inputs are copied now; results are
// copied to their destination after success.
class OpBackend::Operands {
 public:
  explicit Operands(at::Device device) : device_(device) {}

  Tensors inputs, outputs, results;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // to, from

  Operands& read(const at::Tensor& tensor) {
    inputs.push_back(source(tensor));
    return *this;
  }
  Operands& read(const Tensors& tensors) {
    for (const auto& each : tensors) read(each);
    return *this;
  }
  // Splits the tensor into one piece per rank: by lengths along the first dimension, or equally.
  Operands& read_pieces(const at::Tensor& tensor, int size, const std::vector<std::int64_t>& lengths = {}) {
    inputs = pieces(source(tensor), size, lengths);
    return *this;
  }
  Operands& write(const at::Tensor& tensor, bool reads_too = false) {
    outputs.push_back(target(tensor, reads_too));
    results.push_back(tensor);
    return *this;
  }
  Operands& write(const Tensors& tensors) {
    for (const auto& each : tensors) write(each);
    return *this;
  }
  Operands& write_pieces(const at::Tensor& tensor, int size, const std::vector<std::int64_t>& lengths = {}) {
    outputs = pieces(target(tensor, false), size, lengths);
    results.push_back(tensor);
    return *this;
  }

  std::function<void()> copy_back() {
    if (copies.empty()) return nullptr;
    return [copies = std::move(copies)] {
      at::AutoDispatchBelowAutograd guard;
      for (const auto& [to, from] : copies) to.copy_(from);
    };
  }

 private:
  void check(const at::Tensor& tensor) const {
    const auto place = device_.is_cpu() ? std::string("the CPU") : device_.str();
    TORCH_CHECK(tensor.defined(), "expected a tensor, got an undefined one");
    TORCH_CHECK(tensor.device() == device_, "expected a tensor on ", place, ", got one on ", tensor.device(),
                ": move it with tensor.to(), or add a backend for that device to the group");
    TORCH_CHECK(tensor.layout() == at::kStrided, "expected a dense tensor, got one of layout ",
                tensor.layout(), ": convert it with tensor.to_dense()");
  }
  at::Tensor source(const at::Tensor& tensor) const {
    check(tensor);
    return dense(tensor);
  }
  at::Tensor target(const at::Tensor& tensor, bool reads_too) {
    check(tensor);
    auto memory = dense(tensor);
    if (memory.is_same(tensor)) return memory;
    check_tensor(tensor, "a tensor that receives a result", true);
    if (!reads_too) memory = at::empty(tensor.sizes(), tensor.options());
    copies.emplace_back(tensor.detach(), memory);
    return memory;
  }
  static Tensors pieces(const at::Tensor& tensor, int size, const std::vector<std::int64_t>& lengths) {
    if (!lengths.empty()) return tensor.split_with_sizes(lengths);
    TORCH_CHECK(tensor.numel() % size == 0, "a tensor of ", tensor.numel(),
                " elements cannot be split equally among ", size, " ranks");
    auto flat = tensor.view({-1});
    return flat.split_with_sizes(
        std::vector<std::int64_t>(static_cast<std::size_t>(size), flat.numel() / size));
  }

  const at::Device device_;
  at::AutoDispatchBelowAutograd guard_;
};

WorkPtr OpBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors[0].layout() == at::kSparse) return allreduce_sparse(tensors, options);
  return start(
      Operation::all_reduce, OpType::ALLREDUCE, options,
      [&](Operands& operands) { operands.write(only(tensors), true); }, options.reduceOp);
}

WorkPtr OpBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return start_several(OpType::ALLREDUCE_COALESCED, tensors.size(), tensors, [&](std::size_t i) {
    Tensors one{tensors[i]};
    return allreduce(one, options);
  });
}

WorkPtr OpBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  constexpr std::size_t kHead = 3, kDims = 16;
  at::AutoDispatchBelowAutograd guard;
  at::Tensor tensor, own;
  attempt(Operation::all_reduce, options.timeout, [&] {
    tensor = only(tensors);
    TORCH_CHECK(tensor.is_cpu() && tensor.layout() == at::kSparse, "expected a sparse CPU tensor");
    TORCH_CHECK(options.reduceOp == c10d::ReduceOp::SUM,
                "sparse tensors can only be summed; for other reductions use tensor.to_dense()");
    own = tensor.coalesce();
    TORCH_CHECK(static_cast<std::size_t>(own.dim()) <= kDims, "expected a sparse tensor of at most ", kDims,
                " dimensions, got ", own.dim());
  });
  c10d::AllgatherOptions gather;
  gather.timeout = options.timeout;
  gather.asyncOp = false;
  auto from_each = [&](const at::Tensor& mine, auto shape_of) {
    std::vector<Tensors> outputs(1);
    for (int r = 0; r < size_; ++r) outputs[0].push_back(at::empty(shape_of(r), mine.options()));
    Tensors inputs{mine};
    allgather(outputs, inputs, gather)->wait();
    return outputs[0];
  };

  // Number of values of each rank, and their shape.
  std::vector<std::int64_t> head{own._nnz(), own.sparse_dim(), own.dense_dim()};
  head.insert(head.end(), own.sizes().begin(), own.sizes().end());
  head.resize(kHead + kDims, 0);
  const auto heads =
      from_each(at::tensor(head, at::kLong), [&](int) { return std::vector<std::int64_t>{kHead + kDims}; });
  std::vector<std::int64_t> counts;
  for (int r = 0; r < size_; ++r) {
    const auto* other = heads[static_cast<std::size_t>(r)].const_data_ptr<std::int64_t>();
    TORCH_CHECK(std::equal(head.begin() + 1, head.end(), other + 1), getBackendName(),
                ": the sparse tensors of rank ", rank_, " and rank ", r,
                " differ in shape or in the number of sparse dimensions");
    counts.push_back(other[0]);
  }

  auto shaped = [&](const at::Tensor& like, std::int64_t dim) {
    return [&counts, like, dim](int r) {
      auto sizes = like.sizes().vec();
      sizes[static_cast<std::size_t>(dim)] = counts[static_cast<std::size_t>(r)];
      return sizes;
    };
  };
  const auto own_indices = own._indices().contiguous(), own_values = own._values().contiguous();
  const auto indices = from_each(own_indices, shaped(own_indices, 1));
  const auto values = from_each(own_values, shaped(own_values, 0));
  Tensors sums;
  for (std::size_t r = 0; r < indices.size(); ++r)
    sums.push_back(
        at::_sparse_coo_tensor_unsafe(indices[r], values[r], own.sizes(), own.options())._coalesced_(true));
  // The tree over ranks, as in every other sum.
  for (std::size_t step = 1; step < sums.size(); step *= 2)
    for (std::size_t i = 0; i + step < sums.size(); i += 2 * step)
      sums[i] = (sums[i] + sums[i + step]).coalesce();
  tensor.copy_(sums[0]);
  auto work = c10::make_intrusive<EngineWork>(rank_, OpType::_ALLREDUCE_SPARSE, Tensors{}, tensors);
  work->settle(nullptr);
  return work;
}

WorkPtr OpBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return start(
      Operation::reduce, OpType::REDUCE, options,
      [&](Operands& operands) { operands.write(only(tensors), true); }, options.reduceOp, options.rootRank);
}

WorkPtr OpBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return start(
      Operation::broadcast, OpType::BROADCAST, options,
      [&](Operands& operands) { operands.write(only(tensors), options.rootRank == rank_); },
      c10d::ReduceOp::SUM, options.rootRank);
}

WorkPtr OpBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                             const c10d::AllgatherOptions& options) {
  return start(Operation::all_gather, OpType::ALLGATHER, options,
               [&](Operands& operands) { operands.read(only(inputs)).write(first_of(outputs)); });
}

WorkPtr OpBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                   const c10d::AllgatherOptions& options) {
  return start(Operation::all_gather, OpType::_ALLGATHER_BASE, options,
               [&](Operands& operands) { operands.read(input).write_pieces(output, size_); });
}

WorkPtr OpBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& options) {
  Tensors results;
  for (const auto& of_rank : outputs) results.insert(results.end(), of_rank.begin(), of_rank.end());
  return start_several(OpType::ALLGATHER_COALESCED, inputs.size(), std::move(results), [&](std::size_t i) {
    std::vector<Tensors> from_each(1);
    attempt(Operation::all_gather, options.timeout, [&] {
      TORCH_CHECK(outputs.size() == static_cast<std::size_t>(size_),
                  "expected one list of outputs per rank, ", size_, " in all, got ", outputs.size());
      for (const auto& of_rank : outputs) {
        TORCH_CHECK(of_rank.size() == inputs.size(), "expected one output per input, ", inputs.size(),
                    " in all, got ", of_rank.size());
        from_each[0].push_back(of_rank[i]);
      }
    });
    Tensors input{inputs[i]};
    return allgather(from_each, input, options);
  });
}

WorkPtr OpBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                   const c10d::AllgatherOptions& options) {
  const auto count = std::max(outputs.size(), inputs.size());
  return start_several(OpType::ALLGATHER_COALESCED, count, outputs, [&](std::size_t i) {
    attempt(Operation::all_gather, options.timeout, [&] { check_pairs(outputs, inputs); });
    return _allgather_base(outputs[i], inputs[i], options);
  });
}

WorkPtr OpBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                          const c10d::GatherOptions& options) {
  return start(
      Operation::gather, OpType::GATHER, options,
      [&](Operands& operands) { operands.read(only(inputs)).write(first_of(outputs)); }, c10d::ReduceOp::SUM,
      options.rootRank);
}

WorkPtr OpBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                           const c10d::ScatterOptions& options) {
  return start(
      Operation::scatter, OpType::SCATTER, options,
      [&](Operands& operands) { operands.read(first_of(inputs)).write(only(outputs)); }, c10d::ReduceOp::SUM,
      options.rootRank);
}

WorkPtr OpBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                  const c10d::ReduceScatterOptions& options) {
  return start(
      Operation::reduce_scatter, OpType::REDUCE_SCATTER, options,
      [&](Operands& operands) { operands.read(first_of(inputs)).write(only(outputs)); }, options.reduceOp);
}

WorkPtr OpBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                        const c10d::ReduceScatterOptions& options) {
  return start(
      Operation::reduce_scatter, OpType::_REDUCE_SCATTER_BASE, options,
      [&](Operands& operands) { operands.read_pieces(input, size_).write(output); }, options.reduceOp);
}

WorkPtr OpBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                   const c10d::ReduceScatterOptions& options) {
  const auto count = std::max(outputs.size(), inputs.size());
  return start_several(OpType::REDUCE_SCATTER, count, outputs, [&](std::size_t i) {
    attempt(Operation::reduce_scatter, options.timeout, [&] { check_pairs(outputs, inputs); });
    return _reduce_scatter_base(outputs[i], inputs[i], options);
  });
}

WorkPtr OpBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                 std::vector<std::int64_t>& output_splits,
                                 std::vector<std::int64_t>& input_splits,
                                 const c10d::AllToAllOptions& options) {
  return start(Operation::all_to_all, OpType::ALLTOALL_BASE, options, [&](Operands& operands) {
    operands.read_pieces(input, size_, input_splits).write_pieces(output, size_, output_splits);
  });
}

WorkPtr OpBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return start(Operation::all_to_all, OpType::ALLTOALL, options,
               [&](Operands& operands) { operands.read(inputs).write(outputs); });
}

WorkPtr OpBackend::barrier(const c10d::BarrierOptions& options) {
  return start(Operation::barrier, OpType::BARRIER, options, [](Operands&) {});
}

WorkPtr OpBackend::send(Tensors& tensors, int peer, int tag) {
  return start_message(Operation::send, OpType::SEND, tensors, peer, tag);
}

WorkPtr OpBackend::recv(Tensors& tensors, int peer, int tag) {
  return start_message(Operation::recv, OpType::RECV, tensors, peer, tag);
}

WorkPtr OpBackend::recvAnysource(Tensors& tensors, int tag) {
  return start_message(Operation::recv, OpType::RECVANYSOURCE, tensors, kAnySource, tag);
}

// The call as described by Group, or else as given by c10d's arguments.
Call OpBackend::describe(Operation operation, const Tensors& inputs, const Tensors& outputs,
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

OpBackend::Request OpBackend::request(Operation operation, OpType type, Operands& operands,
                                      ReduceOp reduction, std::int64_t root) {
  Request request{.op = {}, .type = type};
  Op& op = request.op;
  const at::Tensor* first = nullptr;
  for (const auto* tensors : {&operands.inputs, &operands.outputs})
    for (const auto& tensor : *tensors) {
      if (first == nullptr) first = &tensor;
      TORCH_CHECK(tensor.scalar_type() == first->scalar_type(), "expected tensors of one dtype, got ",
                  first->scalar_type(), " and ", tensor.scalar_type(), ": convert them with tensor.to()");
      op.item_size = tensor.element_size();
    }
  op.call = describe(operation, operands.inputs, operands.outputs, reduction, static_cast<int>(root));
  check_operands(op.call, operands.inputs, operands.outputs);
  if (reduces(operation)) check_reduction(op.call, device().is_cpu());
  for (const auto& tensor : operands.inputs) op.inputs.push_back(tensor.const_data_ptr());
  for (const auto& tensor : operands.outputs) op.outputs.push_back(tensor.mutable_data_ptr());
  request.keep = copy_what_is_written_over(op, device());
  request.finish = operands.copy_back();
  for (auto* tensors : {&operands.inputs, &operands.outputs})
    request.keep.insert(request.keep.end(), std::make_move_iterator(tensors->begin()),
                        std::make_move_iterator(tensors->end()));
  request.results = std::move(operands.results);
  return request;
}

void OpBackend::refuse(Operation /*operation*/, std::chrono::milliseconds /*timeout*/,
                       const std::exception_ptr& error) {
  std::rethrow_exception(error);
}

template <typename Body>
void OpBackend::attempt(Operation operation, std::chrono::milliseconds timeout, Body body) {
  try {
    body();
  } catch (const std::exception&) {
    refuse(operation, timeout, std::current_exception());
  }
}

void OpBackend::post_refusal(Operation operation, std::chrono::milliseconds timeout, std::string text) {
  Request refused;
  refused.op.call = describe(operation, {}, {}, ReduceOp::SUM, -1);
  refused.op.refusal = std::move(text);
  refused.timeout = std::max(timeout, std::chrono::milliseconds(0));
  post_numbered(std::move(refused));
}

OpBackend::WorkPtr OpBackend::post_numbered(Request wanted) {
  Call& call = wanted.op.call;
  if (current_call() == nullptr) call.sequence = (point_to_point(call.operation) ? messages_ : sequence_)++;
  wanted.explain = explanation(call);
  return post(std::move(wanted));
}

template <typename CallOptions, typename Give>
WorkPtr OpBackend::start(Operation operation, OpType type, const CallOptions& options, Give give,
                         const c10d::ReduceOp& reduction, std::int64_t root) {
  Operands operands(device());
  Request wanted;
  attempt(operation, options.timeout, [&] {
    give(operands);
    wanted = request(operation, type, operands, from_c10d(reduction), root);
  });
  if (options.timeout > std::chrono::milliseconds(0)) wanted.timeout = options.timeout;
  // Group's calls are mostly waited for soon
  wanted.asynchronous = options.asyncOp && current_call() == nullptr;
  return post_numbered(std::move(wanted));
}

template <typename StartOne>
WorkPtr OpBackend::start_several(OpType type, std::size_t count, Tensors results, StartOne start_one) {
  std::vector<WorkPtr> works;
  std::exception_ptr refused;
  for (std::size_t i = 0; i < count; ++i) {
    try {
      works.push_back(start_one(i));
    } catch (const std::exception&) {
      if (!refused) refused = std::current_exception();
    }
  }
  if (refused) std::rethrow_exception(refused);
  return c10::make_intrusive<JoinedWork>(rank_, type, std::move(works), std::move(results));
}

WorkPtr OpBackend::start_message(Operation operation, OpType type, const Tensors& tensors, int peer,
                                 int tag) {
  Operands operands(device());
  Request wanted;
  attempt(operation, {}, [&] {
    if (operation == Operation::send)
      operands.read(only(tensors));
    else
      operands.write(only(tensors), takes_less());
    wanted = request(operation, type, operands, ReduceOp::SUM, peer);
  });
  wanted.op.takes_less = takes_less() && operation == Operation::recv;
  wanted.tag = tag;
  wanted.timeout = wanted.op.call.timeout;
  return post_numbered(std::move(wanted));
}

}  // namespace lockstep::detail

#include <lockstep/comm/transports/mpi/module/backend.h>

#include <cstring>
#include <utility>

#include <lockstep/comm/c10d/tensors.h>
#include <lockstep/comm/reduce/reduce.h>
#include <lockstep/comm/transports/mpi/module/tensors.h>

namespace lockstep::detail {
namespace {

using c10d::OpType;
using namespace mpi;

void post_reduce(MpiPosts& posts, Dtype dtype, ReduceOp op, const at::Tensor& input, const at::Tensor& output,
                 int root) {
  const auto [type, mpi_op] = mpi_reduction_of(dtype, op);
  const auto item = static_cast<std::int64_t>(item_size(dtype));
  const bool at_root = posts.link.rank == root;
  for_pieces(input.numel(), std::max<std::int64_t>(1, posts.link.chunk / item),
             [&](std::int64_t offset, int count) {
               char* in = data_of(input) + offset * item;
               char* out = at_root ? data_of(output) + offset * item : nullptr;
               check_mpi(MPI_Ireduce(at_root && in == out ? MPI_IN_PLACE : in, out, count, type, mpi_op, root,
                                     posts.link.comm, posts.add()),
                         "MPI_Ireduce");
             });
}

MpiWork::Stage division(Dtype dtype, at::Tensor tensor) {
  return [dtype, tensor = std::move(tensor)](MpiPosts& posts, MpiWork&) {
    divide(dtype, tensor.data_ptr(), tensor.numel(), posts.link.size);
  };
}

}  // namespace

MpiBackend::MpiBackend(std::shared_ptr<MpiLink> link)
    : Backend(link->rank, link->size), link_(std::move(link)) {}

void MpiBackend::check_root(std::int64_t root) const {
  TORCH_CHECK(root >= 0 && root < size_, "mpi: root ", root, " is not a rank of a group of ", size_);
}

void MpiBackend::check_peer(int peer, int tag) const {
  TORCH_CHECK((peer >= 0 && peer < size_) || peer == MPI_ANY_SOURCE, "mpi: peer ", peer,
              " is not a rank of a group of ", size_);
  TORCH_CHECK(tag >= 0 && tag < link_->own_tag, "mpi: tag ", tag, " is not in 0..", link_->own_tag - 1);
}

MpiBackend::WorkPtr MpiBackend::submit(OpType type, Tensors outputs, Tensors inputs, Stages stages) {
  auto work =
      c10::make_intrusive<MpiWork>(link_, type, std::move(outputs), std::move(inputs), std::move(stages));
  link_->submit(work);
  return work;
}

MpiWork::Stage MpiBackend::exchange(const Tensors& outputs, const Tensors& inputs) const {
  return [outputs, inputs](MpiPosts& posts, MpiWork&) {
    const auto& link = posts.link;
    const auto has = [](const Tensors& list, int r) {
      const auto i = static_cast<std::size_t>(r);
      return i < list.size() && list[i].defined() && list[i].numel() > 0;
    };
    // Every rank begins with its successor, so that not all send to rank 0 first.
    for (int step = 1; step < link.size; ++step) {
      const int from = (link.rank - step + link.size) % link.size;
      if (has(outputs, from)) {
        const auto& tensor = outputs[static_cast<std::size_t>(from)];
        posts.recv(data_of(tensor), bytes_of(tensor), from, link.own_tag);
      }
    }
    for (int step = 1; step < link.size; ++step) {
      const int to = (link.rank + step) % link.size;
      if (has(inputs, to)) {
        const auto& tensor = inputs[static_cast<std::size_t>(to)];
        posts.send(data_of(tensor), bytes_of(tensor), to, link.own_tag);
      }
    }
    if (has(outputs, link.rank) && has(inputs, link.rank)) {
      const auto& own = inputs[static_cast<std::size_t>(link.rank)];
      std::memmove(data_of(outputs[static_cast<std::size_t>(link.rank)]), data_of(own),
                   static_cast<std::size_t>(bytes_of(own)));
    }
  };
}

MpiBackend::WorkPtr MpiBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const auto& tensor = one_of(tensors);
  check_root(options.rootRank);
  return submit(
      OpType::BROADCAST, tensors, {},
      {[tensor, root = static_cast<int>(options.rootRank)](MpiPosts& posts, MpiWork&) {
        for_pieces(bytes_of(tensor), posts.link.chunk, [&](std::int64_t offset, int count) {
          check_mpi(MPI_Ibcast(data_of(tensor) + offset, count, MPI_BYTE, root, posts.link.comm, posts.add()),
                    "MPI_Ibcast");
        });
      }});
}

MpiBackend::WorkPtr MpiBackend::all_reduce(OpType type, const Tensors& tensors,
                                           const c10d::ReduceOp& reduce_op) {
  Stages stages;
  for (const auto& tensor : tensors) {
    check_tensor(tensor);
    mpi_reduction(dtype_of(tensor.scalar_type()), reduce_op);
  }
  // One stage for all tensors: the next operation of the group may start only after all of them.
  stages.push_back([tensors, reduce_op](MpiPosts& posts, MpiWork&) {
    for (const auto& tensor : tensors) {
      const Dtype dtype = dtype_of(tensor.scalar_type());
      const auto [mpi_type, mpi_op] = mpi_reduction_of(dtype, mpi_reduction(dtype, reduce_op));
      const std::int64_t item = tensor.element_size();
      for_pieces(tensor.numel(), std::max<std::int64_t>(1, posts.link.chunk / item),
                 [&, mpi_type = mpi_type, mpi_op = mpi_op](std::int64_t offset, int count) {
                   check_mpi(MPI_Iallreduce(MPI_IN_PLACE, data_of(tensor) + offset * item, count, mpi_type,
                                            mpi_op, posts.link.comm, posts.add()),
                             "MPI_Iallreduce");
                 });
    }
  });
  if (reduce_op.op_ == c10d::ReduceOp::AVG)
    for (const auto& tensor : tensors) stages.push_back(division(dtype_of(tensor.scalar_type()), tensor));
  return submit(type, tensors, {}, std::move(stages));
}

MpiBackend::WorkPtr MpiBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  one_of(tensors);
  return all_reduce(OpType::ALLREDUCE, tensors, options.reduceOp);
}

MpiBackend::WorkPtr MpiBackend::allreduce_coalesced(Tensors& tensors,
                                                    const c10d::AllreduceCoalescedOptions& options) {
  return all_reduce(OpType::ALLREDUCE_COALESCED, tensors, options.reduceOp);
}

MpiBackend::WorkPtr MpiBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const auto& tensor = one_of(tensors);
  check_root(options.rootRank);
  const Dtype dtype = dtype_of(tensor.scalar_type());
  const ReduceOp op = mpi_reduction(dtype, options.reduceOp);
  const int root = static_cast<int>(options.rootRank);
  Stages stages;
  stages.push_back([tensor, dtype, op, root](MpiPosts& posts, MpiWork&) {
    post_reduce(posts, dtype, op, tensor, tensor, root);
  });
  if (op == ReduceOp::AVG && rank_ == root) stages.push_back(division(dtype, tensor));
  return submit(OpType::REDUCE, tensors, {}, std::move(stages));
}

MpiBackend::WorkPtr MpiBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions&) {
  const auto& input = one_of(inputs);
  const auto& list = list_of(outputs, size_, input.scalar_type());
  const auto& own = list[static_cast<std::size_t>(rank_)];
  TORCH_CHECK(own.numel() == input.numel(), "mpi: all_gather has ", own.numel(), " elements of room for the ",
              input.numel(), " elements of this rank");
  return submit(OpType::ALLGATHER, list, inputs,
                {exchange(list, Tensors(static_cast<std::size_t>(size_), input))});
}

MpiBackend::WorkPtr MpiBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions&) {
  check_same_type(output, input);
  TORCH_CHECK(output.numel() == input.numel() * size_, "mpi: all_gather of ", input.numel(), " elements on ",
              size_, " ranks into ", output.numel());
  if (bytes_of(output) > link_->chunk)
    return submit(OpType::_ALLGATHER_BASE, {output}, {input},
                  {exchange(parts_of(output, size_), Tensors(static_cast<std::size_t>(size_), input))});
  return submit(OpType::_ALLGATHER_BASE, {output}, {input}, {[output, input](MpiPosts& posts, MpiWork&) {
                  // Always in place: MPI requires the same choice on all ranks, and input may be part of
                  // output.
                  const auto bytes = bytes_of(input);
                  std::memmove(data_of(output) + posts.link.rank * bytes, data_of(input),
                               static_cast<std::size_t>(bytes));
                  check_mpi(MPI_Iallgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, data_of(output),
                                           static_cast<int>(bytes), MPI_BYTE, posts.link.comm, posts.add()),
                            "MPI_Iallgather");
                }});
}

MpiBackend::WorkPtr MpiBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  const auto& input = one_of(inputs);
  check_root(options.rootRank);
  const auto root = static_cast<std::size_t>(options.rootRank);
  Tensors list, to(root + 1);
  if (rank_ == options.rootRank) {
    list = list_of(outputs, size_, input.scalar_type());
    TORCH_CHECK(list[root].numel() == input.numel(), "mpi: gather has ", list[root].numel(),
                " elements of room for the ", input.numel(), " elements of the root");
  }
  to[root] = input;
  return submit(OpType::GATHER, list, inputs, {exchange(list, to)});
}

MpiBackend::WorkPtr MpiBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const c10d::ScatterOptions& options) {
  const auto& output = one_of(outputs);
  check_root(options.rootRank);
  const auto root = static_cast<std::size_t>(options.rootRank);
  Tensors list, from(root + 1);
  if (rank_ == options.rootRank) {
    list = list_of(inputs, size_, output.scalar_type());
    TORCH_CHECK(list[root].numel() == output.numel(), "mpi: scatter has ", output.numel(),
                " elements of room for the ", list[root].numel(), " elements of the root");
  }
  from[root] = output;
  return submit(OpType::SCATTER, outputs, list, {exchange(from, list)});
}

// One MPI_Ireduce to each rank, directly from the tensors, of any sizes. Each rank sends as many bytes as
// with MPI_Ireduce_scatter, but without the flat copy that it requires.
MpiBackend::WorkPtr MpiBackend::reduce_scatter_list(OpType type, const at::Tensor& output, Tensors inputs,
                                                    const c10d::ReduceOp& reduce_op) {
  const Dtype dtype = dtype_of(output.scalar_type());
  const ReduceOp op = mpi_reduction(dtype, reduce_op);
  const auto own = static_cast<std::size_t>(rank_);
  TORCH_CHECK(inputs[own].numel() == output.numel(), "mpi: reduce_scatter has ", output.numel(),
              " elements of room for ", inputs[own].numel());
  for (auto& input : inputs)
    if (overlap(input, output) && !(&input == &inputs[own] && same_memory(input, output)))
      input = input.detach().clone();
  Stages stages;
  stages.push_back([inputs, output, dtype, op](MpiPosts& posts, MpiWork&) {
    for (int r = 0; r < posts.link.size; ++r)
      post_reduce(posts, dtype, op, inputs[static_cast<std::size_t>(r)], output, r);
  });
  if (op == ReduceOp::AVG) stages.push_back(division(dtype, output));
  return submit(type, {output}, std::move(inputs), std::move(stages));
}

MpiBackend::WorkPtr MpiBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  const auto& output = one_of(outputs);
  return reduce_scatter_list(OpType::REDUCE_SCATTER, output, list_of(inputs, size_, output.scalar_type()),
                             options.reduceOp);
}

MpiBackend::WorkPtr MpiBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  check_same_type(output, input);
  TORCH_CHECK(input.numel() == output.numel() * size_, "mpi: reduce_scatter of ", input.numel(),
              " elements on ", size_, " ranks into ", output.numel());
  const Dtype dtype = dtype_of(output.scalar_type());
  const ReduceOp op = mpi_reduction(dtype, options.reduceOp);
  // The choice of calls must not depend on anything that differs between ranks; a copy may.
  if (bytes_of(input) > link_->chunk)
    return reduce_scatter_list(OpType::_REDUCE_SCATTER_BASE, output, parts_of(input, size_),
                               options.reduceOp);
  const at::Tensor source = overlap(input, output) ? input.detach().clone() : input;
  Stages stages;
  stages.push_back([source, output, dtype, op](MpiPosts& posts, MpiWork&) {
    const auto [type, mpi_op] = mpi_reduction_of(dtype, op);
    check_mpi(MPI_Ireduce_scatter_block(data_of(source), data_of(output), static_cast<int>(output.numel()),
                                        type, mpi_op, posts.link.comm, posts.add()),
              "MPI_Ireduce_scatter_block");
  });
  if (op == ReduceOp::AVG) stages.push_back(division(dtype, output));
  return submit(OpType::_REDUCE_SCATTER_BASE, {output}, {source}, std::move(stages));
}

MpiBackend::WorkPtr MpiBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<std::int64_t>& output_splits,
                                              std::vector<std::int64_t>& input_splits,
                                              const c10d::AllToAllOptions&) {
  check_same_type(output, input);
  const at::Tensor source = overlap(input, output) ? input.detach().clone() : input;
  const auto to = split_rows(source, input_splits, size_);
  const auto from = split_rows(output, output_splits, size_);
  const auto own = static_cast<std::size_t>(rank_);
  TORCH_CHECK(to[own].numel() == from[own].numel(), "mpi: all_to_all keeps ", to[own].numel(),
              " elements for itself, but has room for ", from[own].numel());
  return submit(OpType::ALLTOALL_BASE, {output}, {source}, {exchange(from, to)});
}

MpiBackend::WorkPtr MpiBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) {
  TORCH_CHECK(outputs.size() == static_cast<std::size_t>(size_) && inputs.size() == outputs.size(),
              "mpi: all_to_all takes ", size_, " tensors on either side");
  Tensors sources = inputs;
  for (std::size_t i = 0; i < inputs.size(); ++i) check_same_type(outputs[i], inputs[i]);
  for (auto& source : sources)
    for (const auto& output : outputs)
      if (overlap(source, output)) {
        source = source.detach().clone();
        break;
      }
  const auto own = static_cast<std::size_t>(rank_);
  TORCH_CHECK(inputs[own].numel() == outputs[own].numel(), "mpi: all_to_all keeps ", inputs[own].numel(),
              " elements for itself, but has room for ", outputs[own].numel());
  return submit(OpType::ALLTOALL, outputs, sources, {exchange(outputs, sources)});
}

MpiBackend::WorkPtr MpiBackend::send(Tensors& tensors, int peer, int tag) {
  const auto& tensor = one_of(tensors);
  check_peer(peer, tag);
  return submit(OpType::SEND, {}, tensors, {[tensor, peer, tag](MpiPosts& posts, MpiWork&) {
                  posts.send(data_of(tensor), bytes_of(tensor), peer, tag);
                }});
}

MpiBackend::WorkPtr MpiBackend::receive(OpType type, const Tensors& tensors, int peer, int tag) {
  const auto& tensor = one_of(tensors);
  check_peer(peer, tag);
  Stages stages;
  const bool gated = peer == MPI_ANY_SOURCE && bytes_of(tensor) > link_->chunk;
  if (gated) {
    // The first message determines the rank; the rest must come from the same one.
    stages.push_back([tensor, tag](MpiPosts& posts, MpiWork&) {
      posts.recv(data_of(tensor), posts.link.chunk, MPI_ANY_SOURCE, tag);
    });
    stages.push_back([tensor, tag](MpiPosts& posts, MpiWork& work) {
      const auto had = posts.link.chunk;
      posts.recv(data_of(tensor) + had, bytes_of(tensor) - had, work.source(), tag);
    });
  } else {
    stages.push_back([tensor, peer, tag](MpiPosts& posts, MpiWork&) {
      posts.recv(data_of(tensor), bytes_of(tensor), peer, tag);
    });
  }
  auto work = c10::make_intrusive<MpiWork>(link_, type, tensors, Tensors{}, std::move(stages));
  work->receive_tag = tag;
  work->gated = gated;
  link_->submit(work);
  return work;
}

MpiBackend::WorkPtr MpiBackend::recv(Tensors& tensors, int peer, int tag) {
  TORCH_CHECK(peer >= 0, "mpi: peer ", peer, " is not a rank of a group of ", size_);
  return receive(OpType::RECV, tensors, peer, tag);
}

MpiBackend::WorkPtr MpiBackend::recvAnysource(Tensors& tensors, int tag) {
  return receive(OpType::RECVANYSOURCE, tensors, MPI_ANY_SOURCE, tag);
}

MpiBackend::WorkPtr MpiBackend::barrier(const c10d::BarrierOptions&) {
  return submit(OpType::BARRIER, {}, {}, {[](MpiPosts& posts, MpiWork&) {
                  check_mpi(MPI_Ibarrier(posts.link.comm, posts.add()), "MPI_Ibarrier");
                }});
}

}  // namespace lockstep::detail

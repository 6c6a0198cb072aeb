// The collectives of Group: checks of the arguments, and substitutes for what an engine lacks.
#include <algorithm>
#include <numeric>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/c10d/tensors.h>
#include <lockstep/comm/group.h>
#include <lockstep/comm/group/work_state.h>
#include <lockstep/comm/reduce/reduce.h>

namespace lockstep {

using detail::check_tensor;
using detail::checked_timeout;
using detail::dense;
using detail::dense_target;
using detail::describe_call;
using detail::to_c10d;
using detail::to_move;
using detail::to_reduce;
using detail::Transport;
using detail::WorkState;

namespace {

// Above every user tag.
constexpr int kLargestTag = (1 << 30) - 1;
int internal_tag(const Call& call) { return kLargestTag + 1 + static_cast<int>(call.sequence % (1 << 29)); }

template <typename Options>
Options with_timeout(const WorkState& pending) {
  Options options;
  options.timeout = pending.engine_timeout();
  return options;
}

template <typename Options>
Options reducing(const Transport& engine, const WorkState& pending) {
  auto options = with_timeout<Options>(pending);
  options.reduceOp = to_c10d(engine_reduction(engine, pending.call().dtype, pending.call().reduction));
  return options;
}

// Divides the sum if the engine did not, before the result is copied to its destination.
void supply_average(const Transport& engine, WorkState& pending, at::Tensor result) {
  if (pending.call().reduction != ReduceOp::AVG || engine.traits().avg) return;
  const auto size = pending.call().size;
  pending.finish.insert(pending.finish.begin(), [result, size] { at::Tensor(result).div_(size); });
}

// For engines without reduce_scatter: all-reduces a copy and takes this rank's part. Moves twice the bytes.
void reduce_scatter_by_all_reduce(Transport& engine, WorkState& pending, const at::Tensor& target,
                                  const std::vector<at::Tensor>& in, std::int64_t offset) {
  std::vector<at::Tensor> flat;
  for (const auto& tensor : in) flat.push_back(tensor.detach().reshape({-1}));
  auto all = at::cat(flat);
  auto part = all.narrow(0, offset, target.numel());
  std::vector<at::Tensor> tensors{to_reduce(engine, all)};
  pending.works.push_back(
      engine.backend().allreduce(tensors, reducing<c10d::AllreduceOptions>(engine, pending)));
  pending.finish.insert(pending.finish.begin(), [target, part] { target.copy_(part.view(target.sizes())); });
  supply_average(engine, pending, part);
}

// True if no rank has data to move. Engines that compare calls must see the call even then.
bool nothing_to_do(const Transport& engine, std::int64_t total) {
  return total == 0 && !engine.traits().compares_calls;
}

std::int64_t total(const std::vector<std::int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
}

std::vector<std::int64_t> counts(const std::vector<at::Tensor>& tensors) {
  std::vector<std::int64_t> result;
  for (const auto& tensor : tensors) result.push_back(tensor.numel());
  return result;
}

std::vector<at::Tensor> moved(const Transport& engine, const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const auto& tensor : tensors) result.push_back(to_move(engine, tensor));
  return result;
}

void check_root(const detail::GroupState& group, int root) {
  if (root < 0 || root >= group.size())
    throw ConfigError(fmt::format("root: expected a rank from 0 to {} of group '{}', got {}",
                                  group.size() - 1, group.name(), root));
}

std::shared_ptr<Transport> engine_for(const detail::GroupState& group, const at::Tensor& tensor,
                                      std::string_view what) {
  auto engine = group.transport(tensor.device().type());
  if (!engine) group.check_open();
  if (!engine && group.verdict() == std::nullopt)
    throw ConfigError(
        fmt::format("{} is on {}, and group '{}' has no transport for that device: move the tensor to {}",
                    what, tensor.device().str(), group.name(), group.control_device().str()));
  return engine;
}

// Checks that the reduction exists (reduce.h) and that the engine supports it.
void check_reduction(const detail::GroupState& group, const at::Tensor& tensor, ReduceOp op) {
  const auto dtype = detail::dtype_of(tensor.scalar_type());
  const char* hint = op == ReduceOp::AVG
                         ? "avg requires a floating-point tensor"
                         : "and, or and xor require integers or bool; complex numbers support sum and avg";
  if (!detail::reducible(dtype, op))
    throw ConfigError(fmt::format("{} of a {} tensor is not defined: {}", name(op), name(dtype), hint));
  auto engine = engine_for(group, tensor, "the tensor");
  if (engine && !engine->reduces(dtype, op))
    throw ConfigError(fmt::format("the {} transport of group '{}' does not support {} of {} tensors",
                                  engine->backend().getBackendName(), group.name(), name(op), name(dtype)));
}

void check_alike(const std::vector<at::Tensor>& tensors, const at::Tensor& model, std::string_view what) {
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i].scalar_type() != model.scalar_type() || tensors[i].device() != model.device())
      throw ConfigError(
          fmt::format("{}[{}] is {} on {}, but the other tensor is {} on {}: use the same dtype and device",
                      what, i, name(detail::dtype_of(tensors[i].scalar_type())), tensors[i].device().str(),
                      name(detail::dtype_of(model.scalar_type())), model.device().str()));
}

void check_list(const detail::GroupState& group, const std::vector<at::Tensor>& tensors,
                std::string_view what, bool writable, const at::Tensor& model) {
  if (static_cast<int>(tensors.size()) != group.size())
    throw ConfigError(fmt::format("{}: expected {} tensors, one per rank of group '{}', got {} tensors", what,
                                  group.size(), group.name(), tensors.size()));
  for (const auto& tensor : tensors) check_tensor(tensor, what, writable);
  check_alike(tensors, model, what);
}

void check_numel(const at::Tensor& large, std::string_view large_name, const at::Tensor& small,
                 std::string_view small_name, int size) {
  if (large.numel() != size * small.numel())
    throw ConfigError(
        fmt::format("{}: expected {} times as many elements as {}, which has {}, got {} elements", large_name,
                    size, small_name, small.numel(), large.numel()));
}

// Copies `from` to `to` on this rank, without the engine.
void copy_here(WorkState& pending, const at::Tensor& to, const at::Tensor& from) {
  pending.finish.emplace_back([to, from] { to.detach().copy_(from.detach().view(to.sizes())); });
}

}  // namespace

Work Group::all_reduce(at::Tensor tensor, AllReduceOptions options, Site site) {
  check_tensor(tensor, "all_reduce's tensor", true);
  check_reduction(*state_, tensor, options.op);
  auto call = describe_call(Operation::all_reduce, tensor, site_.value_or(site));
  call.reduction = options.op;
  call.tag = std::move(options.tag);
  auto start = [&](Transport& engine, WorkState& pending) {
    if (nothing_to_do(engine, tensor.numel())) return;
    auto target = dense_target(pending, tensor, true);
    if (auto* parts = engine.parts()) return pending.post(*parts, {}, {target});
    std::vector<at::Tensor> tensors{to_reduce(engine, target)};
    pending.works.push_back(
        engine.backend().allreduce(tensors, reducing<c10d::AllreduceOptions>(engine, pending)));
    supply_average(engine, pending, target);
  };
  return state_->issue(std::move(call), tensor.device(), options.timeout, start);
}

Work Group::reduce(at::Tensor tensor, ReduceOptions options, Site site) {
  check_tensor(tensor, "reduce's tensor", true);
  check_root(*state_, options.root);
  check_reduction(*state_, tensor, options.op);
  auto call = describe_call(Operation::reduce, tensor, site_.value_or(site));
  call.reduction = options.op;
  call.root = options.root;
  call.tag = std::move(options.tag);
  auto start = [&](Transport& engine, WorkState& pending) {
    if (nothing_to_do(engine, tensor.numel())) return;
    const bool root = rank() == options.root;
    // Engines may use the tensors of non-root ranks as scratch space.
    auto target = root                           ? dense_target(pending, tensor, true)
                  : engine.traits().keeps_inputs ? dense(tensor)
                                                 : tensor.detach().clone(at::MemoryFormat::Contiguous);
    pending.keep.push_back(target);
    if (auto* parts = engine.parts()) return pending.post(*parts, {}, {target});
    std::vector<at::Tensor> tensors{to_reduce(engine, target)};
    auto engine_options = reducing<c10d::ReduceOptions>(engine, pending);
    engine_options.rootRank = options.root;
    pending.works.push_back(engine.backend().reduce(tensors, engine_options));
    if (root) supply_average(engine, pending, target);
  };
  return state_->issue(std::move(call), tensor.device(), options.timeout, start);
}

Work Group::broadcast(at::Tensor tensor, RootOptions options, Site site) {
  check_tensor(tensor, "broadcast's tensor", rank() != options.root);
  check_root(*state_, options.root);
  engine_for(*state_, tensor, "broadcast's tensor");
  auto call = describe_call(Operation::broadcast, tensor, site_.value_or(site));
  call.root = options.root;
  call.tag = std::move(options.tag);
  auto start = [&](Transport& engine, WorkState& pending) {
    if (nothing_to_do(engine, tensor.numel())) return;
    auto target = rank() == options.root ? dense(tensor) : dense_target(pending, tensor, false);
    pending.keep.push_back(target);
    if (auto* parts = engine.parts()) return pending.post(*parts, {}, {target});
    std::vector<at::Tensor> tensors{to_move(engine, target)};
    auto engine_options = with_timeout<c10d::BroadcastOptions>(pending);
    engine_options.rootRank = options.root;
    pending.works.push_back(engine.backend().broadcast(tensors, engine_options));
  };
  return state_->issue(std::move(call), tensor.device(), options.timeout, start);
}

Work Group::all_gather(at::Tensor out, at::Tensor in, CollectiveOptions options, Site site) {
  check_tensor(in, "all_gather's input", false);
  check_tensor(out, "all_gather's output", true);
  check_alike({out}, in, "all_gather's output");
  check_numel(out, "all_gather's output", in, "its input", size());
  engine_for(*state_, in, "all_gather's input");
  auto call = describe_call(Operation::all_gather, in, site_.value_or(site));
  call.from.assign(static_cast<std::size_t>(size()), in.numel());
  call.tag = std::move(options.tag);
  auto start = [&](Transport& engine, WorkState& pending) {
    if (nothing_to_do(engine, in.numel())) return;
    auto source = dense(in);
    auto target = dense_target(pending, out, false);
    pending.keep.push_back(source);
    if (auto* parts = engine.parts()) return pending.post(*parts, {source}, {target});
    auto flat_out = to_move(engine, target).view({-1}), flat_in = to_move(engine, source).view({-1});
    pending.works.push_back(
        engine.backend()._allgather_base(flat_out, flat_in, with_timeout<c10d::AllgatherOptions>(pending)));
  };
  return state_->issue(std::move(call), in.device(), options.timeout, start);
}

Work Group::all_gather(std::vector<at::Tensor> out, at::Tensor in, CollectiveOptions options, Site site) {
  check_tensor(in, "all_gather's input", false);
  check_list(*state_, out, "all_gather's output", true, in);
  engine_for(*state_, in, "all_gather's input");
  auto sizes = counts(out);
  if (sizes[static_cast<std::size_t>(rank())] != in.numel())
    throw ConfigError(
        fmt::format("all_gather's output[{}]: expected {} elements, as in this rank's input, got {}", rank(),
                    in.numel(), sizes[static_cast<std::size_t>(rank())]));
  auto call = describe_call(Operation::all_gather, in, site_.value_or(site));
  call.from = sizes;
  call.tag = std::move(options.tag);
  auto start = [&](Transport& engine, WorkState& pending) {
    if (nothing_to_do(engine, total(sizes))) return;
    auto engine_options = with_timeout<c10d::AllgatherOptions>(pending);
    auto source = dense(in);
    pending.keep.push_back(source);
    if (engine.traits().unequal) {
      std::vector<std::vector<at::Tensor>> outs(1);
      for (auto& tensor : out) outs[0].push_back(to_move(engine, dense_target(pending, tensor, false)));
      if (auto* parts = engine.parts()) return pending.post(*parts, {source}, outs[0]);
      std::vector<at::Tensor> ins{to_move(engine, source)};
      pending.works.push_back(engine.backend().allgather(outs, ins, engine_options));
      return;
    }
    // Padded to the size of the largest.
    const auto largest = *std::max_element(sizes.begin(), sizes.end());
    auto padded = at::zeros({largest}, in.options());
    padded.narrow(0, 0, in.numel()).copy_(source.view({-1}));
    auto all = at::empty({largest * size()}, in.options());
    auto flat_out = to_move(engine, all), flat_in = to_move(engine, padded);
    pending.works.push_back(engine.backend()._allgather_base(flat_out, flat_in, engine_options));
    for (std::size_t r = 0; r < out.size(); ++r)
      copy_here(pending, out[r], all.narrow(0, static_cast<std::int64_t>(r) * largest, sizes[r]));
  };
  return state_->issue(std::move(call), in.device(), options.timeout, start);
}

Work Group::gather(std::vector<at::Tensor> out, at::Tensor in, RootOptions options, Site site) {
  check_tensor(in, "gather's input", false);
  check_root(*state_, options.root);
  const bool root = rank() == options.root;
  if (root)
    check_list(*state_, out, "gather's output", true, in);
  else if (!out.empty())
    throw ConfigError(fmt::format(
        "gather's output: expected no tensors on rank {}, which is not the root (rank {}), got {}", rank(),
        options.root, out.size()));
  engine_for(*state_, in, "gather's input");
  if (root && out[static_cast<std::size_t>(rank())].numel() != in.numel())
    throw ConfigError(
        fmt::format("gather's output[{}]: expected {} elements, as in this rank's input, got {}", rank(),
                    in.numel(), out[static_cast<std::size_t>(rank())].numel()));
  auto call = describe_call(Operation::gather, in, site_.value_or(site));
  call.root = options.root;
  if (root) call.from = counts(out);
  call.tag = std::move(options.tag);
  auto start = [&](Transport& engine, WorkState& pending) {
    auto source = dense(in);
    pending.keep.push_back(source);
    std::vector<at::Tensor> ins{to_move(engine, source)};
    if (engine.traits().unequal) {
      std::vector<std::vector<at::Tensor>> outs;
      if (root) {
        outs.emplace_back();
        for (auto& tensor : out) outs[0].push_back(to_move(engine, dense_target(pending, tensor, false)));
      }
      if (auto* parts = engine.parts())
        return pending.post(*parts, ins, root ? outs[0] : std::vector<at::Tensor>());
      auto engine_options = with_timeout<c10d::GatherOptions>(pending);
      engine_options.rootRank = options.root;
      pending.works.push_back(engine.backend().gather(outs, ins, engine_options));
      return;
    }
    pending.by_messages = true;
    const int tag = internal_tag(pending.call());
    state_->together(engine, pending, [&] {
      if (!root) {
        if (in.numel() > 0) pending.works.push_back(engine.backend().send(ins, options.root, tag));
        return;
      }
      for (int r = 0; r < size(); ++r) {
        auto& tensor = out[static_cast<std::size_t>(r)];
        if (r == rank()) {
          copy_here(pending, tensor, source);
        } else if (tensor.numel() > 0) {
          std::vector<at::Tensor> outs{to_move(engine, dense_target(pending, tensor, false))};
          pending.works.push_back(engine.backend().recv(outs, r, tag));
        }
      }
    });
  };
  return state_->issue(std::move(call), in.device(), options.timeout, start);
}

Work Group::scatter(at::Tensor out, std::vector<at::Tensor> in, RootOptions options, Site site) {
  check_tensor(out, "scatter's output", true);
  check_root(*state_, options.root);
  const bool root = rank() == options.root;
  if (root)
    check_list(*state_, in, "scatter's input", false, out);
  else if (!in.empty())
    throw ConfigError(fmt::format(
        "scatter's input: expected no tensors on rank {}, which is not the root (rank {}), got {}", rank(),
        options.root, in.size()));
  engine_for(*state_, out, "scatter's output");
  if (root && in[static_cast<std::size_t>(rank())].numel() != out.numel())
    throw ConfigError(
        fmt::format("scatter's input[{}]: expected {} elements, as in this rank's output, got {}", rank(),
                    out.numel(), in[static_cast<std::size_t>(rank())].numel()));
  auto call = describe_call(Operation::scatter, out, site_.value_or(site));
  call.root = options.root;
  if (root) call.to = counts(in);
  call.tag = std::move(options.tag);
  auto start = [&](Transport& engine, WorkState& pending) {
    std::vector<at::Tensor> sources;
    for (const auto& tensor : in) sources.push_back(dense(tensor));
    if (engine.traits().unequal) {
      std::vector<at::Tensor> outs{to_move(engine, dense_target(pending, out, false))};
      pending.keep.insert(pending.keep.end(), sources.begin(), sources.end());
      if (auto* parts = engine.parts()) return pending.post(*parts, sources, outs);
      std::vector<std::vector<at::Tensor>> ins;
      if (root) ins.push_back(moved(engine, sources));
      auto engine_options = with_timeout<c10d::ScatterOptions>(pending);
      engine_options.rootRank = options.root;
      pending.works.push_back(engine.backend().scatter(outs, ins, engine_options));
      return;
    }
    pending.by_messages = true;
    const int tag = internal_tag(pending.call());
    state_->together(engine, pending, [&] {
      if (!root) {
        std::vector<at::Tensor> outs{to_move(engine, dense_target(pending, out, false))};
        if (out.numel() > 0) pending.works.push_back(engine.backend().recv(outs, options.root, tag));
        return;
      }
      for (int r = 0; r < size(); ++r) {
        auto& source = sources[static_cast<std::size_t>(r)];
        std::vector<at::Tensor> ins{to_move(engine, source)};
        if (r == rank())
          copy_here(pending, out, source);
        else if (source.numel() > 0)
          pending.works.push_back(engine.backend().send(ins, r, tag));
        pending.keep.push_back(source);
      }
    });
  };
  return state_->issue(std::move(call), out.device(), options.timeout, start);
}

Work Group::reduce_scatter(at::Tensor out, at::Tensor in, AllReduceOptions options, Site site) {
  check_tensor(in, "reduce_scatter's input", false);
  check_tensor(out, "reduce_scatter's output", true);
  check_alike({out}, in, "reduce_scatter's output");
  check_numel(in, "reduce_scatter's input", out, "its output", size());
  check_reduction(*state_, in, options.op);
  auto call = describe_call(Operation::reduce_scatter, in, site_.value_or(site));
  call.reduction = options.op;
  call.to.assign(static_cast<std::size_t>(size()), out.numel());
  call.tag = std::move(options.tag);
  auto start = [&](Transport& engine, WorkState& pending) {
    if (nothing_to_do(engine, in.numel())) return;
    auto source = dense(in);
    auto target = dense_target(pending, out, false);
    if (!engine.traits().reduce_scatter)
      return reduce_scatter_by_all_reduce(engine, pending, target, {source}, rank() * out.numel());
    pending.keep.push_back(source);
    if (auto* parts = engine.parts()) return pending.post(*parts, {source}, {target});
    auto flat_out = to_reduce(engine, target), flat_in = to_reduce(engine, source);
    pending.works.push_back(engine.backend()._reduce_scatter_base(
        flat_out, flat_in, reducing<c10d::ReduceScatterOptions>(engine, pending)));
    supply_average(engine, pending, target);
  };
  return state_->issue(std::move(call), in.device(), options.timeout, start);
}

Work Group::reduce_scatter(at::Tensor out, std::vector<at::Tensor> in, AllReduceOptions options, Site site) {
  check_tensor(out, "reduce_scatter's output", true);
  check_list(*state_, in, "reduce_scatter's input", false, out);
  check_reduction(*state_, out, options.op);
  auto sizes = counts(in);
  if (sizes[static_cast<std::size_t>(rank())] != out.numel())
    throw ConfigError(
        fmt::format("reduce_scatter's input[{}]: expected {} elements, as in this rank's output, got {}",
                    rank(), out.numel(), sizes[static_cast<std::size_t>(rank())]));
  auto call = describe_call(Operation::reduce_scatter, out, site_.value_or(site));
  call.reduction = options.op;
  call.to = sizes;
  call.tag = std::move(options.tag);
  auto start = [&](Transport& engine, WorkState& pending) {
    if (nothing_to_do(engine, total(sizes))) return;
    auto target = dense_target(pending, out, false);
    if (!engine.traits().unequal) {
      const auto before = std::accumulate(sizes.begin(), sizes.begin() + rank(), std::int64_t{0});
      return reduce_scatter_by_all_reduce(engine, pending, target, in, before);
    }
    std::vector<at::Tensor> outs{to_reduce(engine, target)};
    std::vector<std::vector<at::Tensor>> ins(1);
    for (const auto& tensor : in) ins[0].push_back(to_reduce(engine, dense(tensor)));
    pending.keep.insert(pending.keep.end(), ins[0].begin(), ins[0].end());
    if (auto* parts = engine.parts()) return pending.post(*parts, ins[0], outs);
    pending.works.push_back(
        engine.backend().reduce_scatter(outs, ins, reducing<c10d::ReduceScatterOptions>(engine, pending)));
    supply_average(engine, pending, target);
  };
  return state_->issue(std::move(call), out.device(), options.timeout, start);
}

Work Group::all_to_all(at::Tensor out, at::Tensor in, AllToAllOptions options, Site site) {
  check_tensor(in, "all_to_all's input", false);
  check_tensor(out, "all_to_all's output", true);
  check_alike({out}, in, "all_to_all's output");
  engine_for(*state_, in, "all_to_all's input");
  if (detail::overlap(out, in))
    throw ConfigError("all_to_all's input and output share memory: all_to_all does not work in place");
  // Converts rows of the first dimension to elements.
  auto elements = [&](const at::Tensor& tensor, std::vector<std::int64_t> splits, std::string_view what) {
    const auto rows = tensor.dim() == 0 ? tensor.numel() : tensor.size(0);
    if (splits.empty()) {
      if (rows % size() != 0)
        throw ConfigError(
            fmt::format("all_to_all's {}put has {} rows, which cannot be split equally among {} ranks: set "
                        "{}_splits",
                        what, rows, size(), what));
      splits.assign(static_cast<std::size_t>(size()), rows / size());
    }
    if (static_cast<int>(splits.size()) != size() || total(splits) != rows ||
        std::any_of(splits.begin(), splits.end(), [](auto split) { return split < 0; }))
      throw ConfigError(fmt::format(
          "{}_splits: expected {} non-negative numbers that add up to the {} rows of the {}put, got [{}]",
          what, size(), rows, what, fmt::join(splits, ", ")));
    const auto row = rows == 0 ? 0 : tensor.numel() / rows;
    for (auto& split : splits) split *= row;
    return splits;
  };
  auto call = describe_call(Operation::all_to_all, in, site_.value_or(site));
  call.to = elements(in, std::move(options.in_splits), "in");
  call.from = elements(out, std::move(options.out_splits), "out");
  call.tag = std::move(options.tag);
  auto start = [&](Transport& engine, WorkState& pending) {
    auto source = dense(in);
    auto target = dense_target(pending, out, false);
    pending.keep.push_back(source);
    if (auto* parts = engine.parts()) return pending.post(*parts, {source}, {target});
    auto flat_out = to_move(engine, target).view({-1}), flat_in = to_move(engine, source).view({-1});
    const auto scale = engine.traits().any_dtype ? 1 : static_cast<std::int64_t>(in.element_size());
    auto from = pending.call().from, to = pending.call().to;
    for (auto* table : {&from, &to})
      for (auto& count : *table) count *= scale;
    pending.works.push_back(engine.backend().alltoall_base(flat_out, flat_in, from, to,
                                                           with_timeout<c10d::AllToAllOptions>(pending)));
  };
  return state_->issue(std::move(call), in.device(), options.timeout, start);
}

namespace {

void check_peer(const Group& group, const PeerOptions& options, bool any_allowed) {
  const bool any = any_allowed && options.peer == kAnyRank && group.size() > 1;
  if (!any && (options.peer < 0 || options.peer >= group.size() || options.peer == group.rank()))
    throw ConfigError(fmt::format(
        "peer: expected another rank from 0 to {}{} on rank {} of group '{}', got {}", group.size() - 1,
        any_allowed ? ", or kAnyRank," : "", group.rank(), group.name(), options.peer));
  if (options.tag < 0 || options.tag > kLargestTag)
    throw ConfigError(fmt::format("tag: expected 0 to {}, got {}", kLargestTag, options.tag));
}

// Rejects tags and receives from any rank on an engine without tags. engine is null if the group has failed;
// the caller reports that.
void check_tags(const Group& group, const std::shared_ptr<Transport>& engine, const PeerOptions& options) {
  if (!engine || engine->traits().tags) return;
  const auto name = engine->backend().getBackendName();
  if (options.peer == kAnyRank)
    throw ConfigError(
        fmt::format("recv from any rank is not supported on group '{}': with {}, name the sender, a rank "
                    "from 0 to {}",
                    group.name(), name, group.size() - 1));
  if (options.tag != 0)
    throw ConfigError(fmt::format(
        "tag={} is not supported on group '{}': {} has no tags and pairs the messages of two ranks in order; "
        "use tag 0, or a separate group for each kind of message",
        options.tag, group.name(), name));
}

Call describe_message(Operation operation, const at::Tensor& tensor, const PeerOptions& options, Site site) {
  auto call = describe_call(operation, tensor, site);
  call.root = options.peer;
  if (options.tag != 0) call.tag = std::to_string(options.tag);
  if (options.timeout) call.timeout = checked_timeout(*options.timeout);
  return call;
}

}  // namespace

Work Group::send(at::Tensor tensor, PeerOptions options, Site site) {
  check_tensor(tensor, "send's tensor", false);
  check_peer(*this, options, false);
  check_tags(*this, engine_for(*state_, tensor, "send's tensor"), options);
  auto call = describe_message(Operation::send, tensor, options, site_.value_or(site));
  auto start = [&](Transport& engine, WorkState& pending) {
    if (nothing_to_do(engine, tensor.numel())) return;
    auto source = dense(tensor);
    pending.keep.push_back(source);
    std::vector<at::Tensor> tensors{to_move(engine, source)};
    pending.works.push_back(engine.backend().send(tensors, options.peer, options.tag));
  };
  return state_->issue(std::move(call), tensor.device(), options.timeout, start);
}

Work Group::recv(at::Tensor tensor, PeerOptions options, Site site) {
  check_tensor(tensor, "recv's tensor", true);
  check_peer(*this, options, true);
  check_tags(*this, engine_for(*state_, tensor, "recv's tensor"), options);
  if (options.peer == kAnyRank && tensor.numel() == 0)
    throw ConfigError(
        "recv of an empty tensor from any rank is not supported: nothing is sent, so the sender is unknown");
  auto call = describe_message(Operation::recv, tensor, options, site_.value_or(site));
  auto start = [&](Transport& engine, WorkState& pending) {
    if (nothing_to_do(engine, tensor.numel())) return;
    std::vector<at::Tensor> tensors{to_move(engine, dense_target(pending, tensor, false))};
    pending.works.push_back(options.peer == kAnyRank
                                ? engine.backend().recvAnysource(tensors, options.tag)
                                : engine.backend().recv(tensors, options.peer, options.tag));
  };
  return state_->issue(std::move(call), tensor.device(), options.timeout, start);
}

Work Group::barrier(CollectiveOptions options, Site site) {
  state_->refuse_within_coalesce("barrier");
  auto call = describe_call(Operation::barrier, {}, site_.value_or(site));
  call.tag = std::move(options.tag);
  const auto device = state_->control_device();
  auto start = [&](Transport& engine, WorkState& pending) {
    if (auto* parts = engine.parts()) return pending.post(*parts, {}, {});
    auto engine_options = with_timeout<c10d::BarrierOptions>(pending);
    if (device.is_cuda()) engine_options.device = device;
    pending.works.push_back(engine.backend().barrier(engine_options));
  };
  return state_->issue(std::move(call), device, options.timeout, start);
}

}  // namespace lockstep

// Sums of micro-batches, buckets, when each is reduced, and the end of a pass: the check for missing
// gradients and the wait for all buckets.
#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <tuple>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/base/span.h>
#include <lockstep/base/text.h>
#include <lockstep/comm/cpu_memory.h>
#include <lockstep/modules/detail/flat_views.h>
#include <lockstep/modules/detail/unready_gradient.h>
#include <lockstep/parallel/ddp/reducer.h>
#include <lockstep/parallel/ddp/shards.h>

namespace lockstep::detail {
namespace {

constexpr std::int64_t kAlignment = 64;  // Alignment of a gradient in its bucket, in bytes.

bool low_precision(at::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf; }

void copy_gradient(const at::Tensor& to, const at::Tensor& from) {
  if (to.is_cpu() && from.is_cpu() && to.is_contiguous() && from.is_contiguous() && !from.is_conj() &&
      !from.is_neg() && to.scalar_type() == from.scalar_type())
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
  else
    to.copy_(from, /*non_blocking=*/true);
}

}  // namespace

void DdpReducer::set_aside(Param& param) {
  if (micro_batch_ > 0 || param.fired > 0) return;
  param.aside = true;
  if (auto& grad = param.tensor.mutable_grad(); grad.defined()) {
    // Clone a view of the bucket, because the bucket is overwritten once the sum is complete.
    param.before = param.bucket && grad.is_alias_of(param.view) ? grad.clone() : grad;
    grad.reset();
  }
}

bool DdpReducer::wide(const Param& param) const {
  return options_.micro_batches > 1 && !alone_ && low_precision(param.tensor.scalar_type());
}

// A binary counter: each entry of levels is the sum of an aligned subtree of the tree over micro-batches.
void DdpReducer::fold(Param& param) {
  auto& grad = param.tensor.mutable_grad();
  const bool last = micro_batch_ + 1 == options_.micro_batches;
  auto sum = std::exchange(grad, {});  // Undefined if the parameter was not used.
  if (sum.defined() && low_precision(sum.scalar_type()))
    sum = sum.to(at::kFloat);  // Rounded only once, at the end.
  param.levels.resize(std::bit_width(static_cast<unsigned>(options_.micro_batches)));
  const auto add = [&](at::Tensor& left) {
    auto taken = std::exchange(left, {});
    sum = !taken.defined() ? sum : sum.defined() ? taken.add_(sum) : taken;
  };
  std::size_t level = 0;
  for (; (micro_batch_ >> level) & 1; ++level) add(param.levels[level]);
  if (!last) {
    param.levels[level] = std::move(sum);
    return;
  }
  for (; level < param.levels.size(); ++level) add(param.levels[level]);
  if (!sum.defined()) return;
  if (alone_) sum.div_(options_.micro_batches);
  if (wide(param) && !sum.is_sparse())
    param.sum = std::move(sum);
  else
    grad = sum.to(param.tensor.scalar_type());
}

// Every rank makes the same buckets: parameters in the order in which root saw their gradients in its first
// step, then the rest in reverse order of registration.
void DdpReducer::make_buckets(int root, const std::vector<char>& used, bool shadow) {
  const auto count = params_.size();
  std::vector<std::int32_t> order(count);
  std::vector<char> placed(count);
  // For each parameter, over all ranks: whether its gradient is sparse; whether it is dense; how often it got
  // one.
  std::vector<char> kinds(3 * count);
  std::size_t at = 0;
  const auto place = [&](std::size_t i) {
    if (std::exchange(placed[i], true)) return;
    order[at++] = static_cast<std::int32_t>(i);
  };
  for (const auto i : order_) place(i);
  for (auto i = count; i-- > 0;) place(i);
  for (std::size_t i = 0; i < count; ++i) {
    const auto& grad = params_[i].tensor.grad();
    if (grad.defined() && params_[i].used) kinds[grad.is_sparse() ? i : count + i] = 1;
    kinds[2 * count + i] = static_cast<char>(std::min(params_[i].fired, 100));
  }
  kinds = agree_on_most(std::move(kinds));
  std::string bytes(reinterpret_cast<const char*>(order.data()), order.size() * sizeof(order[0]));
  bytes = group_.broadcast_value(std::string_view(bytes), {.root = root, .tag = "ddp order"});
  bytes.copy(reinterpret_cast<char*>(order.data()), bytes.size());

  struct Open {
    std::vector<std::size_t> params;
    std::int64_t bytes = 0;
    bool first = true;
  };
  // Keyed by the bucket's type, the parameters' type and the device, because shards store weights in the same
  // layout.
  std::map<std::tuple<at::ScalarType, at::ScalarType, std::string>, Open> open;
  std::vector<std::vector<std::size_t>> closed;
  for (std::size_t k = 0; k < count; ++k) {
    const auto i = static_cast<std::size_t>(order[k]);
    auto& param = params_[i];
    if (kinds[i] && kinds[count + i])
      throw ConfigError(fmt::format(
          "parameter '{}': the gradient is sparse on some ranks and dense on others", param.name));
    param.sparse = kinds[i] != 0;
    if (options_.static_graph) param.expected = shadow ? kinds[2 * count + i] : param.fired;
    // A parameter that no rank used may be used later, unless the graph is static.
    if (param.sparse || (options_.static_graph && used[i] != kUsed)) continue;
    param.in_place = may_be_in_place(param);
    if (param.in_place) {
      closed.push_back({i});
      continue;
    }
    const auto type = wide(param) ? at::kFloat : param.tensor.scalar_type();
    auto& bucket = open[{type, param.tensor.scalar_type(), param.tensor.device().str()}];
    bucket.params.push_back(i);
    bucket.bytes += param.tensor.numel() * static_cast<std::int64_t>(c10::elementSize(type));
    if (bucket.bytes < (bucket.first ? options_.first_bucket_bytes : options_.bucket_bytes)) continue;
    closed.push_back(std::move(bucket.params));
    bucket = {{}, 0, false};
  }
  for (auto& [key, bucket] : open)
    if (!bucket.params.empty()) closed.push_back(std::move(bucket.params));

  for (const auto& members : closed) {
    Bucket bucket{.shown = GradBucket(buckets_.size(), buckets_.size() + 1 == closed.size(), group_),
                  .params = members,
                  .missing = 0,
                  .tag = fmt::format("ddp bucket {}", buckets_.size())};
    const auto& model = params_[members[0]].tensor;
    if (params_[members[0]].in_place) {
      bucket.bytes = static_cast<std::int64_t>(model.nbytes());
      bucket.offsets = {0};
      bucket.elements = model.numel();
      bucket.shown.names_.push_back(params_[members[0]].name);
      params_[members[0]].bucket = buckets_.size();
      buckets_.push_back(std::move(bucket));
      continue;
    }
    const auto type = wide(params_[members[0]]) ? at::kFloat : model.scalar_type();
    const auto rounding =
        std::max<std::int64_t>(kAlignment / static_cast<std::int64_t>(c10::elementSize(type)), 1);
    auto& size = bucket.elements;
    auto& offsets = bucket.offsets;
    for (const auto i : members) {
      offsets.push_back(size);
      size += (params_[i].tensor.numel() + rounding - 1) / rounding * rounding;
    }
    auto& buffer = bucket.shown.buffer_;
    buffer = flat_memory(group_, size, type, model);
    bucket.bytes = static_cast<std::int64_t>(buffer.nbytes());
    buffer.zero_();  // The padding between gradients is summed too.
    for (std::size_t k = 0; k < members.size(); ++k) {
      auto& param = params_[members[k]];
      param.bucket = buckets_.size();
      param.view = view_of(buffer, offsets[k], param.tensor);
      bucket.shown.gradients_.push_back(param.view);
      bucket.shown.names_.push_back(param.name);
    }
    buckets_.push_back(std::move(bucket));
  }
  buckets_made_ = true;
}

bool DdpReducer::may_be_in_place(const Param& param) const {
  return zero_copy_ && param.tensor.is_cpu() && param.tensor.nbytes() >= kLeastShared &&
         param.tensor.is_non_overlapping_and_dense();
}

// The gradient's memory becomes the bucket only if nothing else holds it: another gradient could be a view of
// it.
void DdpReducer::adopt(Param& param, std::size_t holders) {
  const auto& grad = param.tensor.grad();
  if (grad.defined() && grad.is_sparse())
    throw ConfigError(fmt::format(
        "parameter '{}': the gradient is sparse, but was dense or missing in the first step", param.name));
  const bool fits = grad.defined() && grad.is_cpu() && grad.scalar_type() == param.tensor.scalar_type() &&
                    same_layout(grad, param.tensor) && !grad.is_conj() && !grad.is_neg() &&
                    grad.storage().use_count() <= holders;
  auto& view = param.view;
  if (fits) {
    // Not a view as autograd sees it, unlike the views of buckets.
    at::AutoDispatchBelowADInplaceOrView untracked;
    view = grad.as_strided(grad.sizes(), grad.strides(), grad.storage_offset());
  } else {
    view = view_of(flat_memory(group_, param.tensor.numel(), param.tensor.scalar_type(), param.tensor), 0,
                   param.tensor);
    if (grad.defined())
      copy_gradient(view, grad);
    else
      view.zero_();
  }
  ++(!fits ? counts_.copied : in_shared_memory(view) ? counts_.in_place : counts_.staged);
  auto& shown = buckets_[*param.bucket].shown;
  at::AutoDispatchBelowADInplaceOrView untracked;
  shown.buffer_ = view.as_strided({view.numel()}, {1}, view.storage_offset());
  shown.gradients_ = {view};
}

// Copies the gradient to its place in the bucket and makes p.grad() a view of that place.
void DdpReducer::fill(Param& param, std::size_t holders) {
  if (param.in_place) return adopt(param, holders);
  ++counts_.in_buckets;
  auto& grad = param.tensor.mutable_grad();
  if (wide(param) && param.sum.defined()) {
    copy_gradient(param.view, param.sum);
    return param.sum.reset();
  }
  if (!grad.defined()) {  // No gradient, or a function returned an undefined one.
    param.view.zero_();
    return;
  }
  if (grad.is_sparse())
    throw ConfigError(fmt::format(
        "parameter '{}': the gradient is sparse, but was dense or missing in the first step", param.name));
  if (grad.const_data_ptr() == param.view.const_data_ptr() && grad.strides() == param.view.strides()) return;
  // On a device, one kernel copies all of a full bucket's gradients.
  if (!param.view.is_cpu()) {
    buckets_[*param.bucket].moving.emplace_back(&param, grad);
    return;
  }
  copy_gradient(param.view, grad);
  grad = param.view;
}

void DdpReducer::move(Bucket& bucket) {
  if (bucket.moving.empty()) return;
  std::vector<at::Tensor> to, from;
  for (const auto& [param, gradient] : bucket.moving) to.push_back(param->view), from.push_back(gradient);
  at::_foreach_copy_(to, from, /*non_blocking=*/true);
  for (const auto& [param, gradient] : bucket.moving) param->tensor.mutable_grad() = param->view;
  bucket.moving.clear();
}

void DdpReducer::launch_ready() {
  while (launched_ < buckets_.size() && buckets_[launched_].missing == 0) launch(buckets_[launched_]);
}

void DdpReducer::launch(Bucket& bucket) {
  const Span span(SpanKind::bucket, bucket.tag, bucket.bytes);
  const ModelScope scope(model_, /*begins=*/launched_ == 0);
  for (const auto i : bucket.params) {
    auto& param = params_[i];
    if (param.ready()) continue;
    // No gradient in this pass: keep the previous one, and restore it if no rank has a new one.
    if (options_.find_unused_parameters && param.tensor.grad().defined())
      param.kept = param.tensor.grad().clone();
    fill(param);
  }
  move(bucket);
  auto& buffer = bucket.shown.buffer_;
  if (weight_) buffer.mul_(*weight_);
  if (hook_) {
    ++launched_;  // It may have sent something before throwing.
    bucket.complete = hook_(bucket.shown);
  } else {
    if (!alone_) bucket.work = reduce(buffer, bucket);
    ++launched_;
  }
}

void DdpReducer::complete(Bucket& bucket) {
  if (bucket.complete) bucket.complete();
  if (bucket.work) bucket.work->wait();
  auto& buffer = bucket.shown.buffer_;
  if (hook_ && weight_) buffer.mul_(group_.size());  // The hook averaged, but a weighted sum is needed.
  if (options_.micro_batches > 1 && !alone_)
    buffer.div_(hook_ ? options_.micro_batches : options_.micro_batches * group_.size());
}

// Gathers every rank's entries, in rank order. Entries with the same index are summed.
void DdpReducer::reduce_sparse(Param& param) {
  auto& grad = param.tensor.mutable_grad();
  if (grad.defined() && !grad.is_sparse())
    throw ConfigError(
        fmt::format("parameter '{}': the gradient is dense, but was sparse in the first step", param.name));
  struct Entries {
    std::int64_t count = 0;
    std::int64_t sparse_dims = 0;  // 0: this rank has no entries.
  };
  const auto mine = grad.defined() ? grad.coalesce() : at::Tensor();
  const auto all = group_.all_gather_values(
      mine.defined() ? Entries{mine._nnz(), mine.sparse_dim()} : Entries{}, {.tag = "ddp sparse"});
  std::int64_t dims = 0;
  for (const auto& each : all) {
    if (dims != 0 && each.sparse_dims != 0 && each.sparse_dims != dims)
      throw ConfigError(
          fmt::format("parameter '{}': the gradient has {} sparse dimensions on some ranks and {} on others",
                      param.name, dims, each.sparse_dims));
    dims = std::max(dims, each.sparse_dims);
  }
  if (dims == 0) return;  // Unused on every rank.
  std::vector<std::int64_t> sizes = {0};
  for (auto d = dims; d < param.tensor.dim(); ++d) sizes.push_back(param.tensor.size(d));
  const auto options = param.tensor.options().requires_grad(false);
  auto values = mine.defined() ? mine.values().contiguous() : at::empty(sizes, options);
  if (weight_) values = values * *weight_;
  const auto indices =
      mine.defined() ? mine.indices().contiguous() : at::empty({dims, 0}, options.dtype(at::kLong));
  std::vector<at::Tensor> all_indices, all_values;
  for (const auto& each : all) {
    sizes[0] = each.count;
    all_values.push_back(at::empty(sizes, values.options()));
    all_indices.push_back(at::empty({dims, each.count}, indices.options()));
  }
  group_.all_gather(all_indices, indices, {.tag = "ddp sparse"}).wait();
  group_.all_gather(all_values, values, {.tag = "ddp sparse"}).wait();
  auto sum =
      at::sparse_coo_tensor(at::cat(all_indices, 1), at::cat(all_values, 0), param.tensor.sizes()).coalesce();
  const int parts = options_.micro_batches * (weight_ ? 1 : group_.size());
  grad = sum.div_(parts);
}

std::vector<char> DdpReducer::agree_on_most(std::vector<char> mine) {
  const auto flags = at::from_blob(mine.data(), {static_cast<std::int64_t>(mine.size())}, at::kByte);
  const bool cpu = !group_.backend(at::kCPU).empty();
  auto shared = cpu ? flags : flags.to(params_[0].tensor.device());
  group_.all_reduce(shared, {.op = ReduceOp::MAX, .tag = "ddp used parameters"}).wait();
  if (!cpu) flags.copy_(shared);
  return mine;
}

void DdpReducer::require_all_gradients() const {
  std::vector<std::string> missing;
  for (const auto& param : params_)
    if (param.expected > 0 && !param.ready()) missing.push_back(param.name);
  if (missing.empty()) return;
  throw ConfigError(fmt::format(
      "no gradient for {} in this backward pass. If {} {{.find_unused_parameters = true}}; freeze "
      "parameters that are never trained before constructing DDP, or list them in {{.ignore}}. If a step "
      "runs several backward passes, or passes in pieces as a Pipeline does, set {{.reduce_in_backward = "
      "false}} and call reduce()",
      quoted_list(missing),
      options_.static_graph ? "the steps do not all use the same parameters, remove static_graph and set"
                            : "the model does not use every parameter in every step, set"));
}

// The end of a pass: reduces what is left and waits for what is in flight. shadow: this rank has run out of
// data and contributes zeros.
void DdpReducer::settle(bool last, bool shadow) {
  const bool learning = !buckets_made_;
  const ModelScope scope(model_, /*begins=*/launched_ == 0);
  const bool may_miss = options_.find_unused_parameters || (options_.static_graph && learning);
  if (!may_miss && !shadow) require_all_gradients();
  std::vector<char> used;
  for (auto& param : params_) {
    param.used |= param.fired > 0;
    if (options_.micro_batches > 1 && param.fired == 0) set_aside(param), fold(param);
    used.push_back(!may_miss || param.used ? kUsed : param.tensor.grad().defined() ? kKept : kNothing);
  }
  if (!last) {
    const auto missing = options_.micro_batches - micro_batch_ - 1;
    make_gradients_unready(fmt::format(
        "{0} of {1} micro-batches are missing (DdpOptions::micro_batches = {1}), so the gradients cannot "
        "be read. Call step(), clip_grad_norm() and GradScaler only after {1} backward passes. To drop the "
        "incomplete sum, call zero_grad() or ddp.discard_micro_batches()",
        missing, options_.micro_batches));
    return;
  }
  if (!direct()) {
    if (learning) {
      if (may_miss) used = agree_on_most(std::move(used));
      make_buckets(shadow || joining_ ? last_active_ : 0, used, shadow);
      for (auto& param : params_)
        if (param.bucket && param.ready()) fill(param);
      if (options_.static_graph) used_ = used;
    }
    while (launched_ < buckets_.size()) launch(buckets_[launched_]);
    for (auto& param : params_)
      if (param.sparse) reduce_sparse(param);
    if (options_.static_graph)
      used = used_;
    else if (may_miss && !learning)
      used = agree_on_most(std::move(used));
    for (auto& bucket : buckets_) complete(bucket);
  }
  for (std::size_t i = 0; i < params_.size(); ++i) {
    auto& param = params_[i];
    auto& grad = param.tensor.mutable_grad();
    if (param.bucket && used[i] == kUsed)
      grad = wide(param) ? param.view.to(param.tensor.scalar_type()) : param.view;
    else if (param.kept.defined())
      param.view.copy_(param.kept), grad = wide(param) ? param.kept : param.view;
    else if (shadow && used[i] == kKept && !param.sparse)  // The ranks with data kept theirs.
      grad = param.bucket ? param.view : at::zeros_like(param.tensor);
    param.kept.reset();
    param.aside = false;
    if (auto before = std::exchange(param.before, {}); before.defined())
      grad = grad.defined() ? grad.add_(before) : before;
    param.used = false;
  }
  if (shards_) {
    shards_->take_gradients();
    make_gradients_unready(ParameterShards::kGradientsAreSharded);
  }
  tell_memory();
}

// Reports to a profiler the memory of buckets beyond the gradients that live in them, which the optimizer
// reports.
void DdpReducer::tell_memory() const {
  const auto sink = span_sink();
  if (!sink) return;
  std::size_t bytes = 0;
  for (const auto& bucket : buckets_) {
    if (params_[bucket.params[0]].in_place) continue;  // Its memory is the gradient's.
    bytes += static_cast<std::size_t>(bucket.bytes);
    for (const auto i : bucket.params)
      if (const auto& grad = params_[i].tensor.grad();
          grad.defined() && !unready_text(grad) && grad.is_alias_of(params_[i].view))
        bytes -= grad.nbytes();
  }
  for (std::size_t i = 0; shards_ && i < shards_->size(); ++i)
    if (const auto& grad = shards_->slice(i).grad(); grad.defined())
      for (const auto& bucket : buckets_)
        if (const auto& buffer = bucket.shown.buffer_;
            buffer.defined() && !params_[bucket.params[0]].in_place && grad.is_alias_of(buffer))
          bytes -= grad.nbytes();
  sink->note("memory.buckets", std::to_string(bytes));
}

}  // namespace lockstep::detail

// The part of DistributedDataParallel for optimizers that update only part of the parameters on each rank;
// and reduce(), which starts the collective of a bucket, with or without such an optimizer.
#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/modules/replicas.h>
#include <lockstep/parallel/ddp/reducer.h>
#include <lockstep/parallel/ddp/shards.h>

namespace lockstep::detail {

Work DdpReducer::reduce(const at::Tensor& buffer, const Bucket& bucket) {
  AllReduceOptions options{.op = weight_ || options_.micro_batches > 1 ? ReduceOp::SUM : ReduceOp::AVG,
                           .tag = bucket.tag};
  if (!shards_) return group_.all_reduce(buffer, std::move(options));
  auto pieces = shards_->pieces(buffer, bucket.shown.index());
  auto mine = pieces[static_cast<std::size_t>(group_.rank())];
  return group_.reduce_scatter(std::move(mine), std::move(pieces), std::move(options));
}

std::shared_ptr<ParameterShards> DdpReducer::shard(bool share_weights) {
  std::lock_guard lock(mutex_);
  check_passes(in_round_ && round_.expired());
  if (in_round_) throw ConfigError("DistributedOptimizer: cannot be constructed inside a backward pass");
  if (shards_)
    throw ConfigError(
        "DistributedOptimizer: this DistributedDataParallel already has one; construct only one");
  if (options_.static_graph)
    throw ConfigError(
        "DistributedOptimizer: cannot be combined with static_graph, because buckets are made before the "
        "first step");
  if (micro_batch_ > 0)
    throw ConfigError("DistributedOptimizer: cannot be constructed in the middle of a sum of micro-batches");
  for (const auto& param : params_)
    if (param.tensor.grad().defined())
      throw ConfigError(fmt::format(
          "DistributedOptimizer: parameter '{}' already has a gradient; construct the optimizer before "
          "backward(), or after zero_grad()",
          param.name));
  require_same_lines(group_, {fmt::format("share_weights {}", share_weights)},
                     "DistributedOptimizer: options differ between ranks");
  try {
    shards_ = make_shards(share_weights);
  } catch (...) {
    forget_early_buckets();
    throw;
  }
  shards_->reducer = weak_from_this();
  install_pre_hooks();
  return shards_;
}

std::shared_ptr<ParameterShards> DdpReducer::make_shards(bool share_weights) {
  if (!alone_ && !buckets_made_) make_buckets(0, std::vector<char>(params_.size(), kUsed), false);
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
  std::vector<ParameterShards::Layout> layouts;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].sparse)
      throw ConfigError(fmt::format(
          "DistributedOptimizer: the gradient of parameter '{}' is sparse; only dense ones are supported",
          params_[i].name));
    names.push_back(params_[i].name);
    tensors.push_back(params_[i].tensor);
    if (alone_) layouts.push_back({{i}, {0}, params_[i].tensor.numel()});
  }
  if (!alone_)
    for (const auto& bucket : buckets_) layouts.push_back({bucket.params, bucket.offsets, bucket.elements});
  return std::make_shared<ParameterShards>(group_, std::move(names), std::move(tensors), std::move(layouts),
                                           share_weights);
}

// Drops buckets made before a backward pass has shown the order of gradients and which of them are sparse.
void DdpReducer::forget_early_buckets() {
  if (rounds_ > 0) return;
  buckets_.clear();
  buckets_made_ = false;
  for (auto& param : params_) {
    param.bucket.reset();
    param.view.reset();
    param.in_place = param.sparse = false;
  }
}

// The optimizer was destroyed: every rank gets whole gradients again.
void DdpReducer::unshard() {
  std::lock_guard lock(mutex_);
  if (micro_batch_ == 0) clear_unready_gradients();
  if (auto shards = std::exchange(shards_, nullptr)) shards->release();
  if (!in_round_) forget_early_buckets();
}

}  // namespace lockstep::detail

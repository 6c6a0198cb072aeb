// Ranks with fewer steps than others. Inside join() every round begins with an exchange: who still has data,
// and how many samples. A rank that has run out answers with none and follows: it gives zeros to every
// bucket.
#include <lockstep/base/error.h>
#include <lockstep/parallel/ddp_reducer.h>
#include <lockstep/parallel/ddp_shards.h>
#include <lockstep/parallel/replicas.h>
#include <lockstep/parallel/unit.h>

#include <ATen/ATen.h>
#include <fmt/format.h>

namespace lockstep::detail {

// Whether anybody still has data.
bool DdpReducer::announce(std::int64_t samples, bool active) {
  const auto all = group_.all_gather_values(Announcement{samples, active}, {.tag = "ddp join"});
  std::int64_t total = 0;
  int first_active = -1, first_idle = -1;
  bool equal = true;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    total += all[rank].samples;
    equal = equal && all[rank].samples == all[0].samples;
    auto& first = all[rank].active ? first_active : first_idle;
    if (first < 0) first = static_cast<int>(rank);
  }
  if (first_active < 0) return false;
  last_active_ = first_active;
  if (first_idle >= 0) {
    uneven_ = true;
    if (throw_early_)
      throw ConfigError(fmt::format("rank {} has run out of data after {} steps, and rank {} has not",
                                    first_idle, rounds_, first_active));
  }
  weight_.reset();
  if (!equal && total > 0) weight_ = static_cast<double>(samples) / static_cast<double>(total);
  return true;
}

// One round of the others.
void DdpReducer::follow(const JoinOptions& options) {
  at::NoGradGuard no_grad;
  for (auto& param : params_) param.tensor.mutable_grad().reset();
  if (shards_) shards_->drop_gradients();
  in_round_ = true;
  settle(true, true);
  ++rounds_;
  if (options_.broadcast_buffers) sync_buffers(last_active_);
  reset_round();
  if (options.step) options.step();
}

void DdpReducer::join(const std::function<void()>& body, const JoinOptions& options) {
  if (joining_) throw ConfigError("join() inside join() is not allowed");
  if (options_.micro_batches > 1) throw ConfigError("join() is not allowed with micro_batches above 1");
  if (!alone_ && meets_in_forward(*module_))
    throw ConfigError(
        "join() is not allowed with SyncBatchNorm, or another module whose forward waits for every rank: "
        "those that have run out of data make none");
  if (shards_ && !options.step)
    throw ConfigError(
        "join() with a DistributedOptimizer needs {.step}: a rank that has run out of data still has its "
        "part of "
        "the parameters to update");
  struct Restore {
    DdpReducer& self;
    ~Restore() { self.joining_ = self.throw_early_ = false; }
  } restore{*this};
  joining_ = true;
  throw_early_ = options.throw_on_early_termination;
  uneven_ = false;
  samples_ = 0;
  told_samples_.reset();
  body();
  if (alone_) return;
  if (in_round_) abandon_round();
  while (announce(0, false)) follow(options);
  weight_.reset();
  if (!uneven_) return;
  if (options.step)
    sync_buffers(last_active_);
  else
    broadcast_tensors(group_, parameters_and_buffers(), last_active_);
}

void DdpBase::join(const std::function<void()>& body, const JoinOptions& options) {
  reducer_->join(body, options);
}
void DdpBase::reduce() { reducer_->reduce_now(); }
void DdpBase::samples(std::int64_t count) { reducer_->samples(count); }
void DdpBase::register_comm_hook(CommHook hook) { reducer_->set_hook(std::move(hook)); }
void DdpBase::sync_buffers() { reducer_->sync_buffers(0); }
std::vector<std::int64_t> DdpBase::bucket_sizes() const { return reducer_->bucket_sizes(); }
DdpCounts DdpBase::counts() const { return reducer_->counts(); }
std::shared_ptr<ParameterShards> DdpBase::shard(bool share_weights) { return reducer_->shard(share_weights); }
void DdpBase::before_forward(std::int64_t samples) { reducer_->before_forward(samples); }
void DdpBase::after_forward(const std::vector<at::Tensor>& outputs) { reducer_->after_forward(outputs); }
DdpBase::NoSync::NoSync(std::shared_ptr<DdpReducer> reducer) : reducer_(std::move(reducer)) {
  reducer_->no_sync(true);
}
DdpBase::NoSync::~NoSync() { reducer_->no_sync(false); }

}  // namespace lockstep::detail

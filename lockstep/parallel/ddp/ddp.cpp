// What DistributedDataParallel<M> has for every M: it forwards to the reducer.
#include <lockstep/parallel/ddp.h>

#include <lockstep/parallel/ddp/reducer.h>
#include <lockstep/parallel/ddp/shards.h>

namespace lockstep::detail {

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
void DdpBase::discard() { reducer_->discard(); }
void DdpBase::discard_micro_batches() { reducer_->discard_micro_batches(); }
void DdpBase::before_forward(const std::vector<at::Tensor>& inputs) { reducer_->before_forward(inputs); }
void DdpBase::after_forward(const std::vector<at::Tensor>& outputs) { reducer_->after_forward(outputs); }
DdpBase::NoSync::NoSync(std::shared_ptr<DdpReducer> reducer) : reducer_(std::move(reducer)) {
  if (reducer_) reducer_->no_sync(true);
}
DdpBase::NoSync& DdpBase::NoSync::operator=(NoSync&& other) noexcept {
  NoSync ended(std::move(*this));
  reducer_ = std::move(other.reducer_);
  return *this;
}
DdpBase::NoSync::~NoSync() {
  if (reducer_) reducer_->no_sync(false);
}

}  // namespace lockstep::detail

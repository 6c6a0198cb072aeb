// Backward passes that end with an exception. The peers of such a rank wait in the collectives of that pass.
// If the program catches the exception and continues, its next pass must not match theirs: one step's bucket
// would be averaged with another's. So the rank first refuses the collectives that its peers still issue in
// the broken pass, which makes them fail there, and then all ranks compare which of them failed. If every
// rank failed, as with bad input everywhere, the ranks are still in step and training continues.
#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/group/refusal.h>
#include <lockstep/modules/replicas.h>
#include <lockstep/parallel/ddp/reducer.h>
#include <lockstep/parallel/ddp/shards.h>

namespace lockstep::detail {
namespace {

constexpr const char* kDiscardAdvice =
    "The gradients of this step are incomplete. Call ddp.discard() on every rank before the next step, or "
    "end the job";

}  // namespace

void DdpReducer::abandon_round() {
  note_broken_pass();
  reset_round();
  forget_micro_batches(/*restore=*/false);  // Gradients may have been zeroed since.
}

void DdpReducer::note_broken_pass() {
  if (alone_ || broken_) return;
  broken_ = BrokenPass{
      .text = fmt::format("rank {} threw an exception in a backward pass. {}", group_.rank(), kDiscardAdvice),
      .missing = missing_collectives()};
  for (auto& bucket : buckets_)
    if (bucket.work) broken_->started.push_back(std::move(*bucket.work));
}

// Number of collectives that a peer issues in this pass and this rank has not. A peer stops at the first one
// it waits for.
std::optional<std::size_t> DdpReducer::missing_collectives() const {
  if (hook_) return std::nullopt;
  const bool last = micro_batch_ + 1 == options_.micro_batches;
  const bool syncs_buffers = options_.broadcast_buffers && !buffers_.empty();
  if (!last && syncs_buffers) return 1;  // The broadcast in the peers' next forward.
  if (!buckets_made_) return 1;          // Ranks agree on buckets before they reduce them.
  const bool may_miss = options_.find_unused_parameters && !options_.static_graph;
  const bool sparse =
      std::any_of(params_.begin(), params_.end(), [](const auto& param) { return param.sparse; });
  return buckets_.size() - launched_ + (sparse || may_miss ? 1 : 0);
}

// ended: true if the pass in progress stopped before its end.
void DdpReducer::check_passes(bool ended) {
  if (ended) abandon_round();
  if (!broken_) return;
  if (!broken_->known_to_all) report_broken_pass();
  if (broken_) throw Error(broken_->text);
}

void DdpReducer::report_broken_pass() {
  const auto missing = broken_->missing;
  const bool refuses =
      Refusal::possible(group_) && missing &&
      std::all_of(params_.begin(), params_.end(), [](const auto& p) { return p.tensor.is_cpu(); });
  for (std::size_t i = 0; refuses && i < *missing; ++i) Refusal::next(group_, broken_->text);
  for (auto& work : std::exchange(broken_->started, {})) {
    try {
      work.wait();
    } catch (const CommError&) {
      if (!Refusal::group_lives(group_)) throw;
    }
  }
  const auto all = group_.all_gather_values(char(1), {.tag = "ddp broken pass"});
  broken_->known_to_all = true;
  if (std::all_of(all.begin(), all.end(), [](char failed) { return failed != 0; })) broken_.reset();
}

// A peer has refused a collective of this pass: waits for the rest and takes part in the comparison.
void DdpReducer::learn_of_broken_pass(const CommError& error) {
  if (alone_ || broken_ || !Refusal::group_lives(group_)) return;
  for (auto& bucket : buckets_) {
    if (!bucket.work) continue;
    try {
      bucket.work->wait();
    } catch (const CommError&) {
      if (!Refusal::group_lives(group_)) return;
    }
  }
  (void)group_.all_gather_values(char(0), {.tag = "ddp broken pass"});
  broken_ = BrokenPass{.text = error.details().cause, .missing = 0, .known_to_all = true};
}

// Averages are missing: an update with what p.grad() holds would let replicas drift apart.
void DdpReducer::refuse_updates() {
  if (broken_ && broken_->known_to_all) make_gradients_unready(broken_->text);
}

void DdpReducer::discard() {
  std::lock_guard lock(mutex_);
  if (in_round_ && !round_.expired())
    throw ConfigError("discard() was called inside a backward pass: call it between passes");
  if (in_round_) abandon_round();
  if (broken_ && !broken_->known_to_all) report_broken_pass();
  unready_ = false;
  forget_micro_batches(/*restore=*/false);
  for (auto& param : params_) {
    param.tensor.mutable_grad().reset();
    param.used = false;
  }
  if (shards_) shards_->drop_gradients();
  // The rank that failed may have updated its parameters with what backward had left.
  if (!alone_) check_replicas(*module_, group_, {.ignore = options_.ignore});
  broken_.reset();
}

}  // namespace lockstep::detail

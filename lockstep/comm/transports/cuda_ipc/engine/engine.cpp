#include <lockstep/comm/transports/cuda_ipc/engine/engine.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include <lockstep/base/error.h>
#include <lockstep/comm/reduce/reduce.h>
#include <lockstep/comm/transports/cuda_ipc/engine/fold.h>
#include <lockstep/memory/align.h>

namespace lockstep::cuda_ipc {
namespace {

constexpr std::size_t kLine = 256;  // alignment of pieces in a stage

std::size_t at(int rank) { return static_cast<std::size_t>(rank); }

std::size_t length(const Op& op, std::int64_t elements) {
  return static_cast<std::size_t>(elements) * op.item_size;
}

}  // namespace

// What a rank publishes when it reaches a collective. It is followed by the offset of each rank's piece and
// the sizes that this rank sends to and receives from each rank.
struct Engine::Offer {
  std::uint64_t digest;
  std::uint64_t is_direct;   // the data is the tensor itself, not a copy
  std::int32_t ready, done;  // events of this rank's track; kAtOnce: nothing to wait for
  Handle memory;

  static std::size_t size_for(int ranks) { return sizeof(Offer) + 3 * sizeof(std::int64_t) * at(ranks); }
  std::int64_t* table(int which, int ranks) {
    return reinterpret_cast<std::int64_t*>(this + 1) + at(which) * at(ranks);
  }
  const std::int64_t* table(int which, int ranks) const {
    return const_cast<Offer*>(this)->table(which, ranks);
  }
  enum { kOffsets, kTo, kFrom };
  static constexpr std::int32_t kAtOnce = -1;
};

Engine::Engine(std::unique_ptr<shm::Engine> host, std::shared_ptr<Peers> peers)
    : host_(std::move(host)),
      peers_(std::move(peers)),
      track_(*peers_->collectives),
      arena_(Arena::of(peers_->device)),
      exchange_(*host_, peers_->rank, peers_->ranks) {}

Engine::~Engine() {
  if (stage_ != nullptr) arena_.free(stage_);
}

// Peers may be about to read the stage, and the stream may wait for an event that is never recorded.
void Engine::give_up() noexcept {
  if (under_way_) {
    track_.lose();
    stage_ = result_ = nullptr;
  }
  host_->give_up();
}

const Engine::Offer& Engine::offer(int rank) const {
  return *reinterpret_cast<const Offer*>(exchange_.of(rank));
}

// ---- publishing -------------------------------------------------------------------------------------------

std::vector<Engine::Piece> Engine::pieces_of(const Op& op) const {
  const Call& call = op.call;
  const int rank = peers_->rank, ranks = peers_->ranks;
  std::vector<Piece> pieces;
  auto add = [&](int reader, const void* data, std::int64_t elements) {
    if (elements > 0) pieces.push_back({reader, static_cast<const char*>(data), length(op, elements)});
  };
  if (ranks == 1) return pieces;
  switch (call.operation) {
    case Operation::all_reduce: add(-1, op.outputs.at(0), call.count); break;
    case Operation::reduce:
      if (rank != call.root) add(call.root, op.outputs.at(0), call.count);
      break;
    case Operation::broadcast:
      if (rank == call.root) add(-1, op.outputs.at(0), call.count);
      break;
    case Operation::all_gather: add(-1, op.inputs.at(0), call.count); break;
    case Operation::gather:
      if (rank != call.root) add(call.root, op.inputs.at(0), call.count);
      break;
    case Operation::scatter:
      if (rank != call.root) break;
      [[fallthrough]];
    case Operation::reduce_scatter:
    case Operation::all_to_all:
      for (int r = 0; r < ranks; ++r)
        if (r != rank) add(r, op.inputs.at(at(r)), call.to.at(at(r)));
      break;
    default: break;
  }
  return pieces;
}

// Locates the pieces: in one piece of the arena, or else copied to the stage.
void Engine::show(const std::vector<Piece>& pieces, Offer& own) {
  const int ranks = peers_->ranks;
  auto* offsets = own.table(Offer::kOffsets, ranks);
  auto tell = [&](const Piece& piece, std::size_t offset) {
    for (int r = 0; r < ranks; ++r)
      if (piece.reader < 0 || piece.reader == r) offsets[r] = static_cast<std::int64_t>(offset);
  };
  if (pieces.empty()) return;
  const Handle* memory = arena_.find(pieces[0].data, pieces[0].bytes).handle;
  own.is_direct = memory != nullptr && std::all_of(pieces.begin(), pieces.end(), [&](const Piece& each) {
                    return arena_.find(each.data, each.bytes).handle == memory;
                  });
  if (own.is_direct != 0) {
    for (const auto& each : pieces) tell(each, arena_.find(each.data, each.bytes).offset);
    own.memory = *memory;
    return;
  }
  std::size_t total = 0;
  for (const auto& each : pieces) total += memory::round_up(each.bytes, kLine);
  if (total > stage_size_) {
    // Larger than necessary: each outgrown stage stays in the arena as a separate piece.
    const auto size = std::max(total, stage_size_ + stage_size_ / 2);
    // The stream waits for its readers before the memory is reused.
    if (stage_ != nullptr) arena_.free(std::exchange(stage_, nullptr));
    stage_size_ = 0;
    stage_ = arena_.allocate(size, track_.stream());
    stage_size_ = size;
  }
  const auto place = arena_.find(stage_, total);
  own.memory = *place.handle;
  std::size_t from = 0;
  for (const auto& each : pieces) {
    copy(stage_ + from, each.data, each.bytes);
    tell(each, place.offset + from);
    from += memory::round_up(each.bytes, kLine);
  }
}

void Engine::begin(Op& op) {
  const OnDevice here(peers_->device);
  const Call& call = op.call;
  const int ranks = peers_->ranks;
  // If the device has nothing to do for this rank, skip its turn.
  auto* ready = static_cast<Order*>(op.order.get())->ready;
  const bool at_once = track_.is_idle() && is_done(cudaEventQuery(ready));
  if (!at_once) track_.wait(ready);

  std::vector<char> word(Offer::size_for(ranks), 0);
  Offer& own = *reinterpret_cast<Offer*>(word.data());
  own.digest = detail::Digest().add(operations_).add(op.item_size).add(call).value();
  own.ready = static_cast<std::int32_t>(2 * operations_ % Track::kEvents);
  own.done = own.ready + 1;
  ++operations_;
  if (detail::pairwise(call.operation)) {
    auto *to = own.table(Offer::kTo, ranks), *from = own.table(Offer::kFrom, ranks);
    std::copy(call.to.begin(), call.to.end(), to);
    std::copy(call.from.begin(), call.from.end(), from);
    if (call.operation == Operation::gather) to[call.root] = call.count;
    if (call.operation == Operation::scatter) from[call.root] = call.count;
  }
  const auto pieces = pieces_of(op);
  show(pieces, own);
  if (at_once && (pieces.empty() || own.is_direct != 0))
    own.ready = Offer::kAtOnce;
  else
    track_.record(own.ready);
  under_way_ = true;
  exchange_.begin(std::move(word));
}

// ---- receiving --------------------------------------------------------------------------------------------

void Engine::finish(Op& op, Clock::time_point deadline) {
  const OnDevice here(peers_->device);
  const int rank = peers_->rank, ranks = peers_->ranks;
  exchange_.finish(deadline);
  compare(op, deadline);
  reached_.assign(at(ranks), nullptr);
  take(op);
  track_.record(offer(rank).done);
  std::vector<cudaEvent_t> takers;
  for (int r = 0; r < ranks; ++r)
    if (r != rank && takes_from(op, r, rank)) takers.push_back(peers_->collective_event(r, offer(r).done));
  exchange_.meet(deadline);
  for (auto* event : takers) track_.wait(event);
  if (result_ != nullptr) {
    copy(op.outputs[0], result_, length(op, op.call.count));
    arena_.free(std::exchange(result_, nullptr));
  }
  check(cudaEventRecord(static_cast<Order*>(op.order.get())->done, track_.stream()),
        "cannot record an event");
  under_way_ = false;
}

void Engine::compare(const Op& op, Clock::time_point deadline) {
  const int ranks = peers_->ranks;
  bool same = true;
  for (int r = 1; r < ranks; ++r) same = same && offer(r).digest == offer(0).digest;
  if (same && detail::pairwise(op.call.operation))
    for (int giver = 0; giver < ranks; ++giver)
      for (int taker = 0; taker < ranks; ++taker)
        same = same &&
               offer(giver).table(Offer::kTo, ranks)[taker] == offer(taker).table(Offer::kFrom, ranks)[giver];
  if (same) return;
  // All have seen the mismatch: now they exchange the full calls.
  const auto packed = detail::pack(op.call);
  exchange_.begin({packed.begin(), packed.end()});
  exchange_.finish(deadline);
  std::vector<Call> calls;
  std::vector<const Call*> pointers;
  for (int r = 0; r < ranks; ++r)
    calls.push_back(
        detail::unpack({reinterpret_cast<const std::uint8_t*>(exchange_.of(r)), packed.size()}, ranks));
  for (const Call& call : calls) pointers.push_back(&call);
  under_way_ = false;  // no peer continues with it
  throw shm::Mismatch(detail::find_mismatch(pointers).value_or(
      "the ranks' calls differ in their number or in the size of an element"));
}

void Engine::wait_for(int rank) {
  if (const auto ready = offer(rank).ready; ready != Offer::kAtOnce)
    track_.wait(peers_->collective_event(rank, ready));
}

// A rank's data for this rank, after the event that signals that it is there.
char* Engine::reach(int rank) {
  char*& known = reached_[at(rank)];
  if (known == nullptr) {
    const Offer& its = offer(rank);
    known = open_memory(its.memory) + its.table(Offer::kOffsets, peers_->ranks)[peers_->rank];
    wait_for(rank);
  }
  return known;
}

const char* Engine::source(const Op& op, int rank) {
  if (rank != peers_->rank) return reach(rank);
  switch (op.call.operation) {
    case Operation::all_reduce:
    case Operation::reduce:
    case Operation::broadcast: return static_cast<const char*>(op.outputs.at(0));
    case Operation::all_gather:
    case Operation::gather: return static_cast<const char*>(op.inputs.at(0));
    default: return static_cast<const char*>(op.inputs.at(at(rank)));
  }
}

void Engine::copy(void* to, const void* from, std::size_t bytes) {
  if (to == from || bytes == 0) return;
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, track_.stream()), "cannot start a copy");
}

void Engine::fold(const Op& op, const std::vector<const void*>& inputs, const std::vector<void*>& outputs,
                  std::int64_t count) {
  const detail::Folds folds = [this](detail::Number number, detail::Fold fold, const detail::FoldJob& job) {
    return kernels::fold(number, fold, job, track_.stream());
  };
  detail::reduce_tree_to_all(folds, op.call.dtype, op.call.reduction, inputs, outputs,
                             static_cast<std::size_t>(count));
}

void Engine::fold_from_all(const Op& op, void* output, std::int64_t count) {
  if (count == 0) return;
  std::vector<const void*> inputs;
  for (int r = 0; r < peers_->ranks; ++r) inputs.push_back(source(op, r));
  if (peers_->ranks == 1) return copy(output, inputs[0], length(op, count));
  fold(op, inputs, {output}, count);
}

bool Engine::is_in_place(const Op& op) const {
  if (op.call.operation != Operation::all_reduce) return false;
  for (int r = 0; r < peers_->ranks; ++r)
    if (offer(r).is_direct == 0) return false;
  return true;
}

void Engine::all_reduce(const Op& op) {
  const int rank = peers_->rank, ranks = peers_->ranks;
  const auto count = op.call.count;
  if (count == 0 || ranks == 1) return;
  if (!is_in_place(op)) {
    // Peers read it where the result belongs, so the result waits until they are done.
    if (offer(rank).is_direct != 0) result_ = arena_.allocate(length(op, count), track_.stream());
    return fold_from_all(op, result_ != nullptr ? result_ : op.outputs[0], count);
  }
  // In steps of 16 bytes, as the kernel processes them.
  const auto step = static_cast<std::int64_t>(16 / op.item_size);
  auto share = [&](int r) {
    if (peers_->one_device) return r == 0 ? 0 : count;
    return std::min(count, (count * r / ranks + step - 1) / step * step);
  };
  const auto from = share(rank), to = rank + 1 == ranks ? count : share(rank + 1);
  if (from == to) return;
  std::vector<void*> places;
  for (int r = 0; r < ranks; ++r)
    places.push_back((r == rank ? static_cast<char*>(op.outputs[0]) : reach(r)) + length(op, from));
  fold(op, {places.begin(), places.end()}, places, to - from);
}

void Engine::take(Op& op) {
  const Call& call = op.call;
  const int rank = peers_->rank, ranks = peers_->ranks;
  auto copy_from = [&](int from, void* to, std::int64_t elements) {
    if (elements > 0) copy(to, source(op, from), length(op, elements));
  };
  switch (call.operation) {
    case Operation::all_reduce: return all_reduce(op);
    case Operation::reduce:
      if (rank == call.root) fold_from_all(op, op.outputs.at(0), call.count);
      return;
    case Operation::reduce_scatter: return fold_from_all(op, op.outputs.at(0), call.to.at(at(rank)));
    case Operation::broadcast:
      if (rank != call.root) copy_from(call.root, op.outputs.at(0), call.count);
      return;
    case Operation::scatter: return copy_from(call.root, op.outputs.at(0), call.count);
    case Operation::gather:
      if (rank != call.root) return;
      [[fallthrough]];
    case Operation::all_gather:
    case Operation::all_to_all:
      for (int i = 0; i < ranks; ++i) {
        const int r = (rank + i) % ranks;  // not all from the same one at once
        copy_from(r, op.outputs.at(at(r)), call.from.at(at(r)));
      }
      return;
    case Operation::barrier:
      for (int r = 0; r < ranks; ++r)
        if (r != rank) wait_for(r);
      return;
    case Operation::send:
    case Operation::recv: break;
  }
  LOCKSTEP_ASSERT(false, "a point-to-point operation among the collectives");
}

// True if one rank reads from, or writes to, another rank's memory.
bool Engine::takes_from(const Op& op, int taker, int giver) const {
  switch (op.call.operation) {
    case Operation::all_reduce: return !is_in_place(op) || !peers_->one_device || taker == 0;
    case Operation::reduce:
    case Operation::gather: return taker == op.call.root;
    case Operation::broadcast:
    case Operation::scatter: return giver == op.call.root;
    case Operation::barrier: return false;
    default: return true;
  }
}

}  // namespace lockstep::cuda_ipc

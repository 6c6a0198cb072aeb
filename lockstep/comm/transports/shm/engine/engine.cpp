#include <lockstep/comm/transports/shm/engine/engine.h>

#include <algorithm>
#include <cstring>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/reduce/reduce.h>
#include <lockstep/comm/transports/shm/engine/collective_state.h>

namespace lockstep::shm {

using lockstep::Operation;

namespace {

using detail::pairwise;

// True if a rank's data consists of one piece for each rank.
bool in_pieces(Operation o) {
  return o == Operation::scatter || o == Operation::reduce_scatter || o == Operation::all_to_all;
}

}  // namespace

Engine::Engine(Region region, int rank, Tuning tuning, Memory& memory, std::vector<int> names)
    : barrier_(region, rank, tuning.spin, std::move(names)),
      tuning_(tuning),
      memory_(memory),
      state_(std::make_unique<CollectiveState>()) {}

Engine::~Engine() {
  if (stage_ != nullptr) memory_.free(stage_);
  for (char* old : old_stages_) memory_.free(old);
}

void Engine::give_up() noexcept {
  stage_ = nullptr;
  old_stages_.clear();
  barrier_.leave(under_way_ ? Line::kFailed : Line::kLeft);
}

char* Engine::stage(std::size_t bytes) {
  if (stage_size_ < bytes) {
    auto* larger = memory_.allocate(2 * bytes);
    // A peer may still read from it, until all have reached the next step.
    if (stage_ != nullptr) old_stages_.push_back(stage_);
    stage_ = larger;
    stage_size_ = bytes;
    stage_place_ = memory_.find(stage_, 2 * stage_size_);
    stage_is_new_ = true;
  }
  return stage_ + stage_size_ * ((barrier_.step() + 1) % 2);
}

void Engine::come() {
  // No rank is in the step before the last any more: its chunks are all done.
  if (barrier_.rank() == 0) {
    Claims& next = barrier_.region().claims(barrier_.step() + 1);
    next.taken.store(0, std::memory_order_relaxed);
    next.finished.store(0, std::memory_order_relaxed);
  }
  barrier_.arrive();
}

void Engine::meet(Clock::time_point deadline) {
  barrier_.await_all(deadline);
  for (char* old : std::exchange(old_stages_, {})) memory_.free(old);
}

void Engine::begin(Op& op) {
  if (!op.refusal.empty()) return begin_refused(op);
  const Call& call = op.call;
  const int rank = barrier_.rank(), ranks = barrier_.ranks();
  CollectiveState& state = *state_;
  state.start(op, barrier_.step() + 1, at(ranks));
  state.window = round_up(tuning_.chunk, kCacheLine);

  auto add = [&](const void* data, std::int64_t elements) {
    const auto* bytes = static_cast<const char*>(data);
    if (!state.own.empty() && bytes != state.own.back() + state.sizes.back()) state.adjacent = false;
    state.own.push_back(bytes);
    state.sizes.push_back(state.length(elements));
    state.bytes += state.sizes.back();
  };
  switch (call.operation) {
    case Operation::broadcast:
      if (rank != call.root) break;
      [[fallthrough]];
    case Operation::all_reduce:
    case Operation::reduce: add(op.outputs.at(0), call.count); break;
    case Operation::all_gather:
    case Operation::gather: add(op.inputs.at(0), call.count); break;
    case Operation::scatter:
      if (rank != call.root) break;
      [[fallthrough]];
    case Operation::reduce_scatter:
    case Operation::all_to_all:
      for (int r = 0; r < ranks; ++r) add(op.inputs.at(at(r)), call.to.at(at(r)));
      break;
    default: break;
  }
  if (in_pieces(call.operation))
    state.window = std::max(round_up(state.window / at(ranks), kCacheLine), kCacheLine);
  // If every rank knows the longest piece, stage no more than that.
  if (!pairwise(call.operation)) {
    auto longest = call.count;
    for (const auto* table : {&call.to, &call.from})
      if (!table->empty()) longest = *std::max_element(table->begin(), table->end());
    state.window = std::min(state.window, round_up(state.length(longest), kCacheLine));
  }

  const auto& region = barrier_.region();
  Header& header = region.header(rank, state.first_step);
  detail::Digest digest;
  digest.add(operations_++)
      .add(op.item_size)
      .add(tuning_.chunk)
      .add(tuning_.claim)
      .add(tuning_.slot_pull)
      .add(static_cast<std::uint64_t>(tuning_.pull_up_to))
      .add(call);
  header = {};
  header.digest = digest.value();
  if (pairwise(call.operation)) {
    auto table = region.sizes(rank, state.first_step);
    std::fill(table.begin(), table.end(), 0);
    auto to = table.first(at(ranks)), from = table.last(at(ranks));
    std::copy(call.to.begin(), call.to.end(), to.begin());
    std::copy(call.from.begin(), call.from.end(), from.begin());
    if (call.operation == Operation::gather) to[at(call.root)] = call.count;
    if (call.operation == Operation::scatter) from[at(call.root)] = call.count;
  }
  if (state.bytes > kInline && state.adjacent) {
    const auto place = memory_.find(state.own[0], state.bytes);
    header.segment = place.segment;
    header.offset = place.offset;
  }
  if (state.bytes <= kInline) {
    char* slot = region.data(rank, state.first_step);
    for (std::size_t i = 0; i < state.own.size(); slot += state.sizes[i++])
      std::memcpy(slot, state.own[i], state.sizes[i]);
  } else if (header.segment == 0) {
    fill_stage(state, 0);
  }
  tell_stage(header);
  under_way_ = true;
  come();
}

// Peers see that this rank's digest differs from theirs.
void Engine::begin_refused(Op& op) {
  state_->start(op, barrier_.step() + 1, at(barrier_.ranks()));
  Header& header = barrier_.region().header(barrier_.rank(), state_->first_step);
  header = {};
  header.digest = detail::Digest().add(operations_++).add(std::string("refused")).value();
  under_way_ = true;
  come();
}

void Engine::tell_stage(Header& header) const {
  header.stage_segment = stage_place_.segment;
  header.stage_offset = stage_place_.offset;
  header.stage_size = stage_size_;
  header.stage_is_new = stage_is_new_;
}

// A rank with a new stage may exit after this operation, so all ranks map it now, even those that do not need
// it yet. Returns true if there is any.
bool Engine::meet_new_stages(std::uint64_t step, Clock::time_point deadline) {
  bool any = false;
  for (int r = 0; r < barrier_.ranks(); ++r) {
    const Header& header = barrier_.region().header(r, step);
    if (header.stage_is_new == 0) continue;
    any = true;
    Source met;
    find_stage(r, header, met, deadline);
  }
  return any;
}

void Engine::find_stage(int rank, const Header& header, Source& source, Clock::time_point deadline) {
  if (header.stage_segment == 0 || rank == barrier_.rank()) return;
  source.stage = memory_.map(rank, {header.stage_segment, header.stage_offset}, 2 * header.stage_size,
                             {barrier_, deadline});
  source.stage_size = header.stage_size;
}

void Engine::finish(Op& op, Clock::time_point deadline) {
  CollectiveState& state = *state_;
  LOCKSTEP_ASSERT(state.op == &op, "another operation has begun");
  meet(deadline);
  check(state, deadline);
  state.has_new_stages = meet_new_stages(state.first_step, deadline);
  find_sources(state, deadline);
  exchange(state, deadline);
  stage_is_new_ = false;
  under_way_ = false;
}

void Engine::check(const CollectiveState& state, Clock::time_point deadline) {
  const auto& region = barrier_.region();
  const int ranks = barrier_.ranks();
  bool same = true;
  for (int r = 1; r < ranks; ++r)
    same = same && region.header(r, state.first_step).digest == region.header(0, state.first_step).digest;
  const bool refuses = !state.op->refusal.empty();
  if (same && !refuses && pairwise(state.call().operation))
    for (int giver = 0; giver < ranks; ++giver)
      for (int taker = 0; taker < ranks; ++taker)
        same = same && region.sizes(giver, state.first_step)[at(taker)] ==
                           region.sizes(taker, state.first_step)[at(ranks + giver)];
  // If all refuse, no digest differs.
  if (same && !refuses) return;

  // All have seen the mismatch: now they exchange the full calls.
  tell_call(*state.op);
  come();
  meet(deadline);
  std::vector<Call> calls;
  std::vector<const Call*> pointers;
  for (int r = 0; r < ranks; ++r) calls.push_back(detail::unpack(region.packed(r, barrier_.step()), ranks));
  for (const Call& call : calls) pointers.push_back(&call);
  under_way_ = false;  // no peer continues with it
  if (const auto text = refusals(); !text.empty()) throw detail::Refused(text);
  throw Mismatch(detail::find_mismatch(pointers).value_or(
      "the ranks' calls differ in their number or in the transport's settings"));
}

// For the step that this rank reaches next.
void Engine::tell_call(const Op& op) {
  const auto step = barrier_.step() + 1;
  const auto packed = detail::pack(op.call);
  std::copy(packed.begin(), packed.end(), barrier_.region().packed(barrier_.rank(), step).begin());
  const auto text = barrier_.region().refusal(barrier_.rank(), step);
  const auto length = std::min(op.refusal.size(), text.size() - 1);
  std::copy_n(op.refusal.begin(), length, text.begin());
  text[length] = '\0';
}

// This rank's own refusal, or else that of the first rank that refuses.
std::string Engine::refusals() const {
  const auto& region = barrier_.region();
  auto of = [&](int rank) {
    const auto text = region.refusal(rank, barrier_.step());
    return std::string(text.data(), ::strnlen(text.data(), text.size()));
  };
  auto text = of(barrier_.rank());
  for (int r = 0; text.empty() && r < barrier_.ranks(); ++r) text = of(r);
  return text;
}

// Call it after all have arrived and before this rank arrives again.
void Engine::find_sources(CollectiveState& state, Clock::time_point deadline) {
  const auto& region = barrier_.region();
  const Call& call = state.call();
  const int ranks = barrier_.ranks();
  state.each_has = in_pieces(call.operation) ? at(ranks) : 1;
  state.pieces.assign(at(ranks) * state.each_has, 0);
  for (int r = 0; r < ranks; ++r) {
    Source& source = state.sources[at(r)];
    std::size_t* pieces = state.pieces.data() + at(r) * state.each_has;
    // Read the sizes now: the next operation of a faster rank overwrites them.
    switch (call.operation) {
      case Operation::broadcast:
        if (r != call.root) continue;
        [[fallthrough]];
      case Operation::all_reduce:
      case Operation::reduce: pieces[0] = state.length(call.count); break;
      case Operation::all_gather: pieces[0] = state.length(call.from.at(at(r))); break;
      case Operation::gather:
        pieces[0] = state.length(region.sizes(r, state.first_step)[at(call.root)]);
        break;
      case Operation::reduce_scatter:
        for (auto elements : call.to) *pieces++ = state.length(elements);
        break;
      case Operation::scatter:
        if (r != call.root) continue;
        [[fallthrough]];
      case Operation::all_to_all:
        for (auto elements : region.sizes(r, state.first_step).first(at(ranks)))
          *pieces++ = state.length(elements);
        break;
      default: continue;
    }
    for (auto bytes : state.pieces_of(r)) source.bytes += bytes;
    if (source.bytes == 0) continue;
    const Header& header = region.header(r, state.first_step);
    const bool own = r == barrier_.rank();
    if (source.bytes <= kInline) {
      source.kind = Source::Kind::slot;
      source.base = region.data(r, state.first_step);
    } else if (header.segment != 0) {
      source.kind = Source::Kind::direct;
      source.place = {header.segment, header.offset};
      if (own) source.base = state.own[0];
    } else {
      source.kind = Source::Kind::staged;
    }
    if (source.kind == Source::Kind::staged) find_stage(r, header, source, deadline);
  }
}

// Ranks whose data is used in place must still be in the operation: it may be the last one before they exit.
void Engine::reach(CollectiveState& state, Clock::time_point deadline) {
  for (int r = 0; r < barrier_.ranks(); ++r) {
    Source& source = state.sources[at(r)];
    if (source.kind == Source::Kind::direct && source.base == nullptr)
      source.base = memory_.map(r, source.place, source.bytes, {barrier_, deadline});
  }
}

// Stages this rank's data, each piece from offset `from`, for the step that it reaches next.
void Engine::fill_stage(const CollectiveState& state, std::size_t from) {
  char* stage = this->stage(state.window * state.own.size());
  for (std::size_t i = 0; i < state.own.size(); ++i)
    if (from < state.sizes[i])
      to_stage_.copy(stage + i * state.window, state.own[i] + from,
                     std::min(state.window, state.sizes[i] - from));
}

const char* Engine::piece(const CollectiveState& state, int rank, int number, std::size_t from) const {
  const Source& source = state.sources[at(rank)];
  if (rank == barrier_.rank()) return state.own[at(number)] + from;
  if (source.kind == Source::Kind::staged)
    return source.stage + source.stage_size * (barrier_.step() % 2) + state.window * at(number);
  const char* base = source.base;
  for (int i = 0; i < number; ++i) base += state.pieces_of(rank)[at(i)];
  return base + from;
}

void Engine::exchange(CollectiveState& state, Clock::time_point deadline) {
  const bool in_slots = state.bytes <= kInline;
  const bool all_reduce = state.call().operation == Operation::all_reduce && !in_slots;
  if (state.call().operation == Operation::all_reduce && in_slots &&
      state.bytes * at(barrier_.ranks()) > tuning_.slot_pull)
    return reduce_slots(state, deadline);
  auto any = [&](Source::Kind kind) {
    return std::any_of(state.sources.begin(), state.sources.end(),
                       [&](const auto& each) { return each.kind == kind; });
  };
  if (all_reduce && !any(Source::Kind::staged)) return reduce_in_place(state, deadline);
  if (all_reduce && any(Source::Kind::direct)) stage_all(state, deadline);
  reach(state, deadline);
  const bool direct = any(Source::Kind::direct), staged = any(Source::Kind::staged);
  const bool by_shares = all_reduce && barrier_.ranks() > tuning_.pull_up_to;

  std::size_t longest = 0;
  for (int r = 0; r < barrier_.ranks(); ++r)
    if (state.sources[at(r)].kind == Source::Kind::staged)
      for (auto bytes : state.pieces_of(r)) longest = std::max(longest, bytes);
  for (std::size_t from = 0;;) {
    if (by_shares)
      reduce_by_shares(state, from, deadline);
    else
      take(state, from, staged ? from + state.window : SIZE_MAX);
    from += state.window;
    if (from >= longest) break;
    if (state.bytes != 0 && state.sources[at(barrier_.rank())].kind == Source::Kind::staged)
      fill_stage(state, from);
    come();
    meet(deadline);
  }
  if (!direct && !state.has_new_stages) return;
  // No rank reads from here any more, and all have mapped the new stages.
  come();
  meet(deadline);
}

// Each rank writes its result over its data, so slower ranks cannot read it in place: all start again with
// staging.
void Engine::stage_all(CollectiveState& state, Clock::time_point deadline) {
  fill_stage(state, 0);
  tell_stage(barrier_.region().header(barrier_.rank(), barrier_.step() + 1));
  come();
  meet(deadline);
  if (meet_new_stages(barrier_.step(), deadline)) state.has_new_stages = true;
  for (int r = 0; r < barrier_.ranks(); ++r) {
    Source& source = state.sources[at(r)];
    source.kind = Source::Kind::staged;
    find_stage(r, barrier_.region().header(r, barrier_.step()), source, deadline);
  }
}

// Takes what this rank needs from the peers' pieces, bytes `from` to `to` of each.
void Engine::take(CollectiveState& state, std::size_t from, std::size_t to) {
  const Call& call = state.call();
  const int rank = barrier_.rank(), ranks = barrier_.ranks();
  auto copy = [&](int giver, int number, void* output) {
    const Source& source = state.sources[at(giver)];
    if (source.kind == Source::Kind::nothing) return;
    const auto size = state.pieces_of(giver)[at(number)];
    // Data that is not staged is complete from the start, and data in a slot does not stay for long.
    const bool staged = source.kind == Source::Kind::staged && giver != rank;
    const auto begin = staged ? from : 0, end = staged ? std::min(to, size) : size;
    if ((!staged && from != 0) || begin >= end) return;
    const char* input = piece(state, giver, number, begin);
    char* target = static_cast<char*>(output) + begin;
    if (input != target) std::memmove(target, input, end - begin);
  };
  auto reduce = [&](int number, void* output) {
    const auto size = state.pieces_of(rank)[at(number)];
    if (from >= size) return;
    for (int r = 0; r < ranks; ++r) state.inputs[at(r)] = piece(state, r, number, from);
    detail::reduce_tree(call.dtype, call.reduction, state.inputs, static_cast<char*>(output) + from,
                        (std::min(to, size) - from) / state.op->item_size);
  };
  // Each rank starts with a different one, so that not all read from one at a time.
  auto each_giver = [&](auto receive) {
    for (int i = 0; i < ranks; ++i) receive((rank + i) % ranks);
  };
  switch (call.operation) {
    case Operation::broadcast:
      if (rank != call.root) copy(call.root, 0, state.op->outputs[0]);
      break;
    case Operation::gather:
      if (rank != call.root) break;
      [[fallthrough]];
    case Operation::all_gather: each_giver([&](int r) { copy(r, 0, state.op->outputs[at(r)]); }); break;
    case Operation::scatter: copy(call.root, rank, state.op->outputs[0]); break;
    case Operation::all_to_all: each_giver([&](int r) { copy(r, rank, state.op->outputs[at(r)]); }); break;
    case Operation::reduce:
      if (rank != call.root) break;
      [[fallthrough]];
    case Operation::all_reduce: reduce(0, state.op->outputs[0]); break;
    case Operation::reduce_scatter: reduce(rank, state.op->outputs[0]); break;
    default: break;
  }
}

}  // namespace lockstep::shm

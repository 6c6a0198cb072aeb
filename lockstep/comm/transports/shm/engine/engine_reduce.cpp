// All-reduce: in place, by shares of staged data, by shares of the slots.
#include <algorithm>
#include <cstring>

#include <lockstep/comm/reduce/reduce.h>
#include <lockstep/comm/transports/shm/engine/collective_state.h>

namespace lockstep::shm {
namespace {

// Smallest chunk in place: less is not worth a claim.
constexpr std::size_t kLeastClaim = 16384;

}  // namespace

// Running ranks claim chunks until all are done.
template <typename Work>
void Engine::share_out(std::uint64_t chunks, Clock::time_point deadline, Work work) {
  Claims& claims = barrier_.region().claims(barrier_.step());
  for (;;) {
    LOCKSTEP_SHM_PAUSE();
    const auto chunk = claims.taken.fetch_add(1, std::memory_order_relaxed);
    if (chunk >= chunks) break;
    work(static_cast<std::size_t>(chunk));
    LOCKSTEP_SHM_PAUSE();
    if (claims.finished.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks) barrier_.tell();
  }
  barrier_.await([&] { return claims.finished.load(std::memory_order_acquire) >= chunks; }, deadline);
}

void Engine::reduce_in_place(CollectiveState& state, Clock::time_point deadline) {
  const auto ranks = at(barrier_.ranks());
  const auto share = round_up((state.bytes + ranks - 1) / ranks, kLeastClaim);
  const auto chunk = std::min(share, round_up(tuning_.claim, kCacheLine));
  std::vector<char*> buffers;
  share_out((state.bytes + chunk - 1) / chunk, deadline, [&](std::size_t i) {
    // While a chunk is left, no rank has left. A rank that arrives when all chunks are done need not map its
    // peers' memory.
    if (buffers.empty()) {
      reach(state, deadline);
      for (int r = 0; r < barrier_.ranks(); ++r)
        buffers.push_back(r == barrier_.rank() ? static_cast<char*>(state.op->outputs[0])
                                               : const_cast<char*>(state.sources[at(r)].base));
    }
    for (std::size_t r = 0; r < ranks; ++r) state.inputs[r] = state.outputs[r] = buffers[r] + i * chunk;
    detail::reduce_tree_to_all(state.call().dtype, state.call().reduction, state.inputs, state.outputs,
                               std::min(chunk, state.bytes - i * chunk) / state.op->item_size);
  });
}

// Each rank sums a share of the slots into its own slot and takes the other shares from its peers' slots.
// That is one more step, but far less to read if there are many ranks.
void Engine::reduce_slots(CollectiveState& state, Clock::time_point deadline) {
  const int ranks = barrier_.ranks();
  const auto& region = barrier_.region();
  const auto share = round_up((state.bytes + at(ranks) - 1) / at(ranks), kCacheLine);
  auto length = [&](int r) {
    const auto start = at(r) * share;
    return start < state.bytes ? std::min(share, state.bytes - start) : 0;
  };
  const auto mine = at(barrier_.rank()) * share;
  if (const auto bytes = length(barrier_.rank()); bytes != 0) {
    for (int r = 0; r < ranks; ++r) state.inputs[at(r)] = region.data(r, state.first_step) + mine;
    // Into the next step's slot, which no rank reads any more: this step's slots belong to the operation
    // after this one.
    detail::reduce_tree(state.call().dtype, state.call().reduction, state.inputs,
                        region.data(barrier_.rank(), state.first_step + 1) + mine,
                        bytes / state.op->item_size);
  }
  come();
  meet(deadline);
  auto* output = static_cast<char*>(state.op->outputs[0]);
  for (int r = 0; r < ranks; ++r)
    if (length(r) != 0)
      std::memcpy(output + at(r) * share, region.data(r, state.first_step + 1) + at(r) * share, length(r));
}

void Engine::reduce_by_shares(CollectiveState& state, std::size_t from, Clock::time_point deadline) {
  const auto ranks = at(barrier_.ranks());
  const auto bytes = std::min(state.window, state.bytes - from);
  const auto share = round_up((bytes + ranks - 1) / ranks, kCacheLine);
  std::vector<char*> stages;
  for (int r = 0; r < barrier_.ranks(); ++r)
    stages.push_back(r == barrier_.rank() ? stage_ + stage_size_ * (barrier_.step() % 2)
                                          : const_cast<char*>(piece(state, r, 0, from)));
  auto length = [&](std::size_t s) { return s * share < bytes ? std::min(share, bytes - s * share) : 0; };
  share_out((bytes + share - 1) / share, deadline, [&](std::size_t s) {
    for (std::size_t r = 0; r < ranks; ++r) state.inputs[r] = stages[r] + s * share;
    detail::reduce_tree(state.call().dtype, state.call().reduction, state.inputs, stages[s] + s * share,
                        length(s) / state.op->item_size);
  });
  auto* output = static_cast<char*>(state.op->outputs[0]) + from;
  for (std::size_t s = 0; s < ranks; ++s)
    if (length(s) != 0) std::memcpy(output + s * share, stages[s] + s * share, length(s));
}

}  // namespace lockstep::shm

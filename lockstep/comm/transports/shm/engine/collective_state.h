// CollectiveState: a collective while the engine works on it.
#pragma once

#include <span>
#include <vector>

#include <lockstep/comm/transports/shm/engine/engine.h>
#include <lockstep/memory/align.h>

namespace lockstep::shm {

using memory::kCacheLine;
using memory::round_up;
inline std::size_t at(int rank) { return static_cast<std::size_t>(rank); }

// Location of a rank's data.
struct Source {
  enum class Kind { nothing, slot, direct, staged };
  Kind kind = Kind::nothing;
  std::size_t bytes = 0;
  const char* base = nullptr;  // of the slot or the memory
  Place place;                 // of the memory
  char* stage = nullptr;       // the first of its two staging buffers
  std::size_t stage_size = 0;
};

// The operation in progress. The object and its memory are reused.
struct Engine::CollectiveState {
  Op* op = nullptr;
  std::vector<const char*> own;    // this rank's pieces
  std::vector<std::size_t> sizes;  // of the pieces, in bytes
  std::size_t bytes = 0;
  bool adjacent = true;
  std::uint64_t first_step = 0;
  std::size_t window = 0;  // bytes of each piece that are staged at a time
  std::vector<Source> sources;
  bool has_new_stages = false;
  std::size_t each_has = 1;         // number of pieces per rank
  std::vector<std::size_t> pieces;  // of every rank, in bytes
  std::vector<const void*> inputs;  // of a reduction
  std::vector<void*> outputs;

  void start(Op& its_part, std::uint64_t step, std::size_t ranks) {
    op = &its_part;
    own.clear();
    sizes.clear();
    bytes = 0;
    adjacent = true;
    first_step = step;
    sources.assign(ranks, {});
    inputs.resize(ranks);
    outputs.resize(ranks);
  }
  const Call& call() const { return op->call; }
  std::size_t length(std::int64_t elements) const {
    return static_cast<std::size_t>(elements) * op->item_size;
  }
  std::span<const std::size_t> pieces_of(int rank) const {
    return std::span(pieces).subspan(static_cast<std::size_t>(rank) * each_has, each_has);
  }
};

}  // namespace lockstep::shm

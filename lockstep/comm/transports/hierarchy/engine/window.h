// The data of an operation over several hosts, while the engine works on it.
#pragma once

#include <algorithm>
#include <vector>

#include <lockstep/comm/transports/hierarchy/engine/engine.h>

namespace lockstep::hierarchy {

inline std::size_t at(int rank) { return static_cast<std::size_t>(rank); }

// One section of every piece: items `from` to `to`.
struct Engine::Window {
  std::size_t from = 0, to = 0;
  Transfers in, out;
  char* partials = nullptr;   // this host's sums
  const char* own = nullptr;  // within them, the sum of this rank's piece
  char* incoming = nullptr;   // the sums of that piece from each other host
  char* result = nullptr;     // the total, if there is no better place for it

  std::size_t clip(std::size_t items) const { return std::min(items, to) - std::min(items, from); }
};

// One piece per rank, of which all ranks hold their own numbers.
struct Engine::Sums {
  Dtype dtype{}, wide{};
  ReduceOp op{};
  std::size_t item = 0, wide_item = 0;
  std::size_t longest = 0;  // items of the longest piece
  std::size_t window = 0;   // items of each piece per window
  std::vector<const char*> inputs;
  std::vector<std::size_t> counts;
  char* output = nullptr;  // for this rank's piece; null: Window::result
  char* widened = nullptr;
  char* wide_result = nullptr;

  bool widens() const { return dtype != wide; }
  char* result(const Window& w) const { return output != nullptr ? output + w.from * item : w.result; }
};

// One block of each rank, and its destination here.
struct Engine::Blocks {
  std::size_t item = 1;
  std::vector<std::size_t> counts;  // in items
  const char* own = nullptr;        // null: Window::result
  std::vector<char*> places;

  const char* from(const Window& w) const { return own != nullptr ? own + w.from * item : w.result; }
  char* to(int rank, const Window& w) const { return places[at(rank)] + w.from * item; }
  std::size_t bytes(int rank, const Window& w) const { return w.clip(counts[at(rank)]) * item; }
};

}  // namespace lockstep::hierarchy

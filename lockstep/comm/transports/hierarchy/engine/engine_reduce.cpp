// Sums: one piece per rank, window by window.
#include <array>

#include <lockstep/comm/reduce/reduce.h>
#include <lockstep/comm/transports/hierarchy/engine/window.h>
#include <lockstep/memory/align.h>

namespace lockstep::hierarchy {
// Scratch memory for the windows: partial sums, data from other hosts, and conversions between two types.
void Engine::prepare(Sums& sums, std::span<Window> windows) {
  sums.wide = detail::accumulator(sums.dtype);
  sums.item = detail::item_size(sums.dtype);
  sums.wide_item = detail::item_size(sums.wide);
  for (auto count : sums.counts) sums.longest = std::max(sums.longest, count);
  sums.window = std::min(window_items(sums.item), std::max<std::size_t>(sums.longest, 1));

  const auto piece = memory::round_up(sums.window * sums.wide_item, memory::kCacheLine);
  std::size_t rounds = 0;  // pieces that this rank sums for others, plus its own
  for (int h = 0; h < hosts_.count(); ++h)
    rounds += (hosts_.ranks_of(h).size() + hosts_.neighbours().size() - 1) / hosts_.neighbours().size();
  const auto hosts = at(hosts_.count());
  const auto each = (rounds + hosts + 1) * piece;
  const auto widened = sums.widens() ? sums.inputs.size() * piece : 0;
  char* next = scratch(windows.size() * each + widened + piece);
  for (Window& window : windows) {
    window.partials = next;
    window.incoming = next + rounds * piece;
    window.result = next + (rounds + hosts) * piece;
    next += each;
  }
  sums.widened = next;
  sums.wide_result = next + widened;
}

// This host's sums of all pieces, by the tree. Each rank sums the pieces that it carries and sends them.
void Engine::start_sums(const Sums& sums, Window& window) {
  const auto neighbours = hosts_.neighbours().size();
  const auto piece = memory::round_up(sums.window * sums.wide_item, memory::kCacheLine);
  const auto mine = window.clip(sums.counts[at(hosts_.rank())]) * sums.wide_item;
  for (int h = 0; h < hosts_.count(); ++h)
    if (h != hosts_.host())
      receive(window.in, hosts_.carrier(h, hosts_.rank()), window.incoming + at(h) * piece, mine, kSumTag);

  auto input = [&](int rank) {
    return sums.widens() ? sums.widened + at(rank) * piece : sums.inputs[at(rank)] + window.from * sums.item;
  };
  if (sums.widens())
    for (int r = 0; r < hosts_.size(); ++r)
      detail::widen(sums.dtype, sums.inputs[at(r)] + window.from * sums.item, sums.widened + at(r) * piece,
                    window.clip(sums.counts[at(r)]));

  char* partial = window.partials;
  const auto op = sums.op == ReduceOp::AVG ? ReduceOp::SUM : sums.op;
  // Data for other hosts first.
  for (int i = 1; i <= hosts_.count(); ++i) {
    const int host = (hosts_.host() + i) % hosts_.count();
    const auto& ranks = hosts_.ranks_of(host);
    for (std::size_t first = 0; first < ranks.size(); first += neighbours, partial += piece) {
      std::vector<const void*> inputs(neighbours, partial);
      std::vector<std::size_t> counts(neighbours, 0);
      for (std::size_t n = 0; n < neighbours && first + n < ranks.size(); ++n) {
        inputs[n] = input(ranks[first + n]);
        counts[n] = window.clip(sums.counts[at(ranks[first + n])]);
      }
      const auto place = at(hosts_.place());
      const char* sum = partial;
      if (inside_.alone() && !sums.widens())
        sum = static_cast<const char*>(inputs[0]);
      else if (std::any_of(counts.begin(), counts.end(), [](auto count) { return count > 0; }))
        inside_.reduce_scatter(sums.wide, op, std::move(inputs), counts, partial, deadline_);
      if (first + place >= ranks.size()) continue;
      const int rank = ranks[first + place];
      if (rank == hosts_.rank())
        window.own = sum;
      else if (host != hosts_.host())
        send(window.out, rank, sum, counts[place] * sums.wide_item, kSumTag);
    }
  }
}

// The sum of the hosts' sums, by the tree over hosts.
void Engine::finish_sums(const Sums& sums, Window& window) {
  wait(window.in);
  const auto count = window.clip(sums.counts[at(hosts_.rank())]);
  if (count > 0) {
    const auto piece = memory::round_up(sums.window * sums.wide_item, memory::kCacheLine);
    std::vector<const void*> inputs;
    for (int h = 0; h < hosts_.count(); ++h)
      inputs.push_back(h == hosts_.host() ? window.own : window.incoming + at(h) * piece);
    char* result = sums.widens() ? sums.wide_result : sums.result(window);
    detail::reduce_tree(sums.wide, sums.op, inputs, result, count, at(hosts_.size()));
    if (sums.widens()) detail::narrow(sums.dtype, result, sums.result(window), count);
  }
  wait(window.out);
}

// Cuts one tensor into one piece per rank.
void Engine::cut(Op& part, Sums& sums, Blocks& blocks) const {
  auto* data = static_cast<char*>(part.outputs.at(0));
  const auto count = static_cast<std::size_t>(part.call.count), ranks = at(hosts_.size());
  // Whole cache lines, whatever an element's size.
  const auto share = memory::round_up((count + ranks - 1) / ranks, memory::kCacheLine);
  sums.dtype = part.call.dtype;
  sums.op = part.call.reduction;
  blocks.item = part.item_size;
  for (std::size_t r = 0; r < ranks; ++r) {
    const auto from = std::min(count, r * share), to = std::min(count, from + share);
    sums.inputs.push_back(data + from * part.item_size);
    sums.counts.push_back(to - from);
    blocks.places.push_back(data + from * part.item_size);
  }
  blocks.counts = sums.counts;
}

void Engine::all_reduce(Op& part) {
  Sums sums;
  Blocks blocks;
  cut(part, sums, blocks);
  sums.output = blocks.places[at(hosts_.rank())];
  blocks.own = sums.output;
  std::array<Window, 3> windows;
  prepare(sums, windows);
  const auto count = (sums.longest + sums.window - 1) / sums.window;
  for (std::size_t i = 0; i < count + 2; ++i) {
    if (i < count) {
      Window& window = windows[i % 3];
      window.from = i * sums.window;
      window.to = window.from + sums.window;
      start_sums(sums, window);
    }
    if (i >= 1 && i <= count) {
      finish_sums(sums, windows[(i - 1) % 3]);
      start_share(blocks, windows[(i - 1) % 3]);
    }
    if (i >= 2) finish_share(blocks, windows[(i - 2) % 3]);
  }
}

void Engine::reduce(Op& part) {
  Sums sums;
  Blocks blocks;
  cut(part, sums, blocks);
  const int root = part.call.root;
  // On other ranks the tensor does not change.
  if (hosts_.rank() == root) blocks.own = sums.output = blocks.places[at(root)];
  std::array<Window, 3> windows;
  prepare(sums, windows);
  const auto count = (sums.longest + sums.window - 1) / sums.window;
  for (std::size_t i = 0; i < count + 2; ++i) {
    if (i < count) {
      Window& window = windows[i % 3];
      window.from = i * sums.window;
      window.to = window.from + sums.window;
      start_sums(sums, window);
    }
    if (i >= 1 && i <= count) {
      finish_sums(sums, windows[(i - 1) % 3]);
      start_gather(blocks, root, windows[(i - 1) % 3]);
    }
    if (i >= 2) finish_gather(blocks, root, windows[(i - 2) % 3]);
  }
}

void Engine::reduce_scatter(Op& part) {
  Sums sums;
  sums.dtype = part.call.dtype;
  sums.op = part.call.reduction;
  for (int r = 0; r < hosts_.size(); ++r) {
    sums.inputs.push_back(static_cast<const char*>(part.inputs.at(at(r))));
    sums.counts.push_back(static_cast<std::size_t>(part.call.to.at(at(r))));
  }
  sums.output = static_cast<char*>(part.outputs.at(0));
  std::array<Window, 2> windows;
  prepare(sums, windows);
  const auto count = (sums.longest + sums.window - 1) / sums.window;
  for (std::size_t i = 0; i < count + 1; ++i) {
    if (i < count) {
      Window& window = windows[i % 2];
      window.from = i * sums.window;
      window.to = window.from + sums.window;
      start_sums(sums, window);
    }
    if (i >= 1) finish_sums(sums, windows[(i - 1) % 2]);
  }
}

}  // namespace lockstep::hierarchy

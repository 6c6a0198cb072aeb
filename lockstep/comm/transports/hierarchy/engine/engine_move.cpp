// Collectives that only move data.
#include <array>
#include <cstring>

#include <lockstep/comm/transports/hierarchy/engine/window.h>

namespace lockstep::hierarchy {

// ---- blocks of every rank ---------------------------------------------------------------------------------

// Each rank sends its block to one rank of each other host.
void Engine::start_share(const Blocks& blocks, Window& window) {
  for (int h = 0; h < hosts_.count(); ++h) {
    if (h == hosts_.host()) continue;
    for (int rank : hosts_.ranks_of(h))
      if (hosts_.carrier(hosts_.host(), rank) == hosts_.rank())
        receive(window.in, rank, blocks.to(rank, window), blocks.bytes(rank, window), kShareTag);
    send(window.out, hosts_.carrier(h, hosts_.rank()), blocks.from(window),
         blocks.bytes(hosts_.rank(), window), kShareTag);
  }
}

// Each rank then shares what it has received with its neighbours: host by host, one block per rank at a time.
void Engine::finish_share(const Blocks& blocks, Window& window) {
  const auto neighbours = hosts_.neighbours().size();
  for (int i = 0; i < hosts_.count(); ++i) {
    if (i == 1) wait(window.in);  // this host's own blocks are already there
    const int host = (hosts_.host() + i) % hosts_.count();
    const auto& ranks = hosts_.ranks_of(host);
    for (std::size_t first = 0; first < ranks.size(); first += neighbours) {
      char nothing = 0;
      std::vector<void*> places(neighbours, &nothing);
      std::vector<std::size_t> sizes(neighbours, 0);
      for (std::size_t n = 0; n < neighbours && first + n < ranks.size(); ++n) {
        places[n] = blocks.to(ranks[first + n], window);
        sizes[n] = blocks.bytes(ranks[first + n], window);
      }
      if (std::all_of(sizes.begin(), sizes.end(), [](auto size) { return size == 0; })) continue;
      const void* own = i == 0 ? blocks.from(window) : places[at(hosts_.place())];
      inside_.all_gather(own, std::move(places), sizes, deadline_);
    }
  }
  wait(window.out);
}

void Engine::all_gather(Op& op) {
  Blocks blocks;
  blocks.item = op.item_size;
  blocks.own = static_cast<const char*>(op.inputs.at(0));
  std::size_t longest = 0;
  for (int r = 0; r < hosts_.size(); ++r) {
    blocks.places.push_back(static_cast<char*>(op.outputs.at(at(r))));
    blocks.counts.push_back(static_cast<std::size_t>(op.call.from.at(at(r))));
    longest = std::max(longest, blocks.counts.back());
  }
  const auto step = window_items(op.item_size);
  const auto count = (longest + step - 1) / step;
  std::array<Window, 2> windows;
  for (std::size_t i = 0; i < count + 1; ++i) {
    if (i < count) {
      windows[i % 2].from = i * step;
      windows[i % 2].to = (i + 1) * step;
      start_share(blocks, windows[i % 2]);
    }
    if (i >= 1) finish_share(blocks, windows[(i - 1) % 2]);
  }
}

// ---- to one rank, or from one -----------------------------------------------------------------------------

void Engine::start_gather(const Blocks& blocks, int root, Window& window) {
  if (hosts_.rank() == root) {
    for (int r = 0; r < hosts_.size(); ++r)
      if (hosts_.host_of(r) != hosts_.host())
        receive(window.in, r, blocks.to(r, window), blocks.bytes(r, window), kShareTag);
  } else if (hosts_.host_of(root) != hosts_.host()) {
    send(window.out, root, blocks.from(window), blocks.bytes(hosts_.rank(), window), kShareTag);
  }
}

void Engine::finish_gather(const Blocks& blocks, int root, Window& window) {
  if (hosts_.host_of(root) == hosts_.host()) {
    std::vector<void*> places;
    std::vector<std::size_t> sizes;
    if (hosts_.rank() == root)
      for (int rank : hosts_.neighbours()) {
        places.push_back(blocks.to(rank, window));
        sizes.push_back(blocks.bytes(rank, window));
      }
    inside_.gather(hosts_.place_of(root), blocks.from(window), blocks.bytes(hosts_.rank(), window),
                   std::move(places), sizes, deadline_);
  }
  wait(window.in);
  wait(window.out);
}

void Engine::gather(Op& op) {
  const Call& call = op.call;
  Transfers transfers;
  std::vector<void*> places;
  std::vector<std::size_t> sizes;
  const auto bytes = static_cast<std::size_t>(call.count) * op.item_size;
  const bool at_root = hosts_.host_of(call.root) == hosts_.host();
  if (hosts_.rank() == call.root)
    for (int r = 0; r < hosts_.size(); ++r) {
      const auto size = static_cast<std::size_t>(call.from.at(at(r))) * op.item_size;
      if (hosts_.host_of(r) != hosts_.host()) {
        receive(transfers, r, op.outputs.at(at(r)), size, kDataTag);
      } else {
        places.push_back(op.outputs.at(at(r)));
        sizes.push_back(size);
      }
    }
  if (at_root)
    inside_.gather(hosts_.place_of(call.root), op.inputs.at(0), bytes, std::move(places), sizes, deadline_);
  else
    send(transfers, call.root, op.inputs.at(0), bytes, kDataTag);
  wait(transfers);
}

void Engine::scatter(Op& op) {
  const Call& call = op.call;
  Transfers transfers;
  std::vector<const void*> pieces;
  std::vector<std::size_t> sizes;
  const auto bytes = static_cast<std::size_t>(call.count) * op.item_size;
  const bool at_root = hosts_.host_of(call.root) == hosts_.host();
  if (hosts_.rank() == call.root)
    for (int r = 0; r < hosts_.size(); ++r) {
      const auto size = static_cast<std::size_t>(call.to.at(at(r))) * op.item_size;
      if (hosts_.host_of(r) != hosts_.host()) {
        send(transfers, r, op.inputs.at(at(r)), size, kDataTag);
      } else {
        pieces.push_back(op.inputs.at(at(r)));
        sizes.push_back(size);
      }
    }
  if (at_root)
    inside_.scatter(hosts_.place_of(call.root), std::move(pieces), sizes, op.outputs.at(0), bytes, deadline_);
  else
    receive(transfers, call.root, op.outputs.at(0), bytes, kDataTag);
  wait(transfers);
}

void Engine::all_to_all(Op& op) {
  const Call& call = op.call;
  Transfers in, out;
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  std::vector<std::size_t> to, from;
  // Each rank begins with its successor, so that not all send to rank 0 first.
  for (int i = 1; i < hosts_.size(); ++i) {
    const int sender = (hosts_.rank() - i + hosts_.size()) % hosts_.size();
    const int receiver = (hosts_.rank() + i) % hosts_.size();
    if (hosts_.host_of(sender) != hosts_.host())
      receive(in, sender, op.outputs.at(at(sender)),
              static_cast<std::size_t>(call.from.at(at(sender))) * op.item_size, kDataTag);
    if (hosts_.host_of(receiver) != hosts_.host())
      send(out, receiver, op.inputs.at(at(receiver)),
           static_cast<std::size_t>(call.to.at(at(receiver))) * op.item_size, kDataTag);
  }
  for (int rank : hosts_.neighbours()) {
    inputs.push_back(op.inputs.at(at(rank)));
    outputs.push_back(op.outputs.at(at(rank)));
    to.push_back(static_cast<std::size_t>(call.to.at(at(rank))) * op.item_size);
    from.push_back(static_cast<std::size_t>(call.from.at(at(rank))) * op.item_size);
  }
  inside_.all_to_all(std::move(inputs), to, std::move(outputs), from, deadline_);
  wait(in);
  wait(out);
}

// From host to host along a binomial tree rooted at the root's host, and within each host from the rank that
// received it. Hosts are numbered from the root's; a host receives from the one that differs in its highest
// bit.
void Engine::broadcast(Op& op) {
  const int hosts = hosts_.count(), root = op.call.root, root_host = hosts_.host_of(root);
  auto* data = static_cast<char*>(op.outputs.at(0));
  const auto bytes = static_cast<std::size_t>(op.call.count) * op.item_size;
  auto speaker = [&](int number) {
    const int host = (root_host + number) % hosts;
    return host == root_host ? root : hosts_.carrier(host, root);
  };
  const int number = (hosts_.host() - root_host + hosts) % hosts;
  const bool speaks = speaker(number) == hosts_.rank();
  int highest = 1;
  while (2 * highest <= number) highest *= 2;

  const auto step = window_items(1) * at(hosts_.size());
  const auto count = (bytes + step - 1) / step;
  auto size = [&](std::size_t window) { return std::min(step, bytes - window * step); };
  std::array<Transfers, 2> in;
  Transfers out;
  auto expect = [&](std::size_t window) {
    if (speaks && number > 0 && window < count)
      receive(in[window % 2], speaker(number - highest), data + window * step, size(window), kDataTag);
  };
  expect(0);
  for (std::size_t i = 0; i < count; ++i) {
    expect(i + 1);
    wait(in[i % 2]);
    if (speaks)
      for (int bit = number == 0 ? 1 : 2 * highest; number + bit < hosts; bit *= 2)
        send(out, speaker(number + bit), data + i * step, size(i), kDataTag);
    inside_.broadcast(hosts_.place_of(speaker(number)), data + i * step, size(i), deadline_);
  }
  wait(out);
}

}  // namespace lockstep::hierarchy

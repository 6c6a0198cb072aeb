#include <lockstep/base/text.h>
#include <lockstep/comm/transports/hierarchy/engine/hosts.h>

#include <algorithm>
#include <bit>
#include <map>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace lockstep::hierarchy {

Hosts::Hosts(std::span<const int> nodes, int rank) : rank_(rank) {
  std::map<int, int> host_of_node;
  for (int r = 0; r < static_cast<int>(nodes.size()); ++r) {
    const auto [host, is_new] = host_of_node.try_emplace(nodes[static_cast<std::size_t>(r)], count());
    if (is_new) ranks_of_.emplace_back();
    auto& ranks = ranks_of_[static_cast<std::size_t>(host->second)];
    host_of_.push_back(host->second);
    place_of_.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(r);
  }
}

bool Hosts::follow_tree() const {
  const auto each = ranks_of_[0].size();
  if (count() > 1 && !std::has_single_bit(each)) return false;
  int next = 0;
  for (const auto& ranks : ranks_of_) {
    const bool is_last = &ranks == &ranks_of_.back();
    if (is_last ? ranks.size() > each : ranks.size() != each) return false;
    for (int rank : ranks)
      if (rank != next++) return false;
  }
  return true;
}

std::string Hosts::text() const {
  const bool alike = std::all_of(ranks_of_.begin(), ranks_of_.end(),
                                 [&](const auto& each) { return each.size() == ranks_of_[0].size(); });
  if (alike)
    return fmt::format("{} x {}", detail::counted(count(), "host"),
                       detail::counted(ranks_of_[0].size(), "rank"));
  std::vector<std::size_t> sizes;
  for (const auto& each : ranks_of_) sizes.push_back(each.size());
  return fmt::format("hosts of {} ranks", fmt::join(sizes, ", "));
}

std::string order_of_sums(const Hosts& hosts) {
  if (hosts.count() == 1) return "the tree over ranks";
  if (hosts.follow_tree()) return "the tree over ranks: the bits of as many ranks on one host";
  return "by host, then over hosts: the same bits in every run and on every rank, but not those of one host";
}

}  // namespace lockstep::hierarchy

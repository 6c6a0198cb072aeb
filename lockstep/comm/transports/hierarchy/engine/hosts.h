// Which ranks of a group share a host. No LibTorch.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace lockstep::hierarchy {

class Hosts {
 public:
  // nodes: of each rank of the group; those with the same number share a host. Hosts count from 0 in the
  // order of their first ranks, the ranks of a host in that of the group.
  Hosts(std::span<const int> nodes, int rank);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(host_of_.size()); }
  int count() const { return static_cast<int>(ranks_of_.size()); }
  int host() const { return host_of(rank_); }    // this rank's
  int place() const { return place_of(rank_); }  // this rank's, among those of its host
  const std::vector<int>& neighbours() const { return ranks_of(host()); }

  int host_of(int rank) const { return host_of_[static_cast<std::size_t>(rank)]; }
  int place_of(int rank) const { return place_of_[static_cast<std::size_t>(rank)]; }
  const std::vector<int>& ranks_of(int host) const { return ranks_of_[static_cast<std::size_t>(host)]; }
  // Of each host one rank speaks for all.
  int leader_of(int host) const { return ranks_of(host)[0]; }
  bool leads() const { return place() == 0; }
  // Who of a host takes what comes from that rank of another, and sends what goes there.
  int carrier(int host, int rank) const {
    const auto& ranks = ranks_of(host);
    return ranks[static_cast<std::size_t>(place_of(rank)) % ranks.size()];
  }

  // Whether the hosts' ranks are whole subtrees of the tree over all ranks: one host after another, the same
  // power of two of them on each, or fewer on the last. Sums have the bits of one host then.
  bool follow_tree() const;
  std::string text() const;  // "2 hosts x 2 ranks", "hosts of 2 and 1 ranks"

 private:
  const int rank_;
  std::vector<int> host_of_, place_of_;
  std::vector<std::vector<int>> ranks_of_;
};

// The order in which such a group sums floating-point numbers, in words.
std::string order_of_sums(const Hosts& hosts);

}  // namespace lockstep::hierarchy

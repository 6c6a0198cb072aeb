// Hosts: which ranks of a group share a host. Does not use LibTorch.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace lockstep::hierarchy {

class Hosts {
 public:
  // nodes: host number of each rank of the group; ranks with the same number share a host. Hosts are numbered
  // from 0 in the order of their first ranks, and the ranks of a host in the group's order.
  Hosts(std::span<const int> nodes, int rank);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(host_of_.size()); }
  int count() const { return static_cast<int>(ranks_of_.size()); }
  int host() const { return host_of(rank_); }    // this rank's host
  int place() const { return place_of(rank_); }  // this rank's index on its host
  const std::vector<int>& neighbours() const { return ranks_of(host()); }

  int host_of(int rank) const { return host_of_[static_cast<std::size_t>(rank)]; }
  int place_of(int rank) const { return place_of_[static_cast<std::size_t>(rank)]; }
  const std::vector<int>& ranks_of(int host) const { return ranks_of_[static_cast<std::size_t>(host)]; }
  // The rank that communicates for its host.
  int leader_of(int host) const { return ranks_of(host)[0]; }
  bool leads() const { return place() == 0; }
  // The rank of a host that exchanges data with the given rank of another host.
  int carrier(int host, int rank) const {
    const auto& ranks = ranks_of(host);
    return ranks[static_cast<std::size_t>(place_of(rank)) % ranks.size()];
  }

  // True if the hosts' ranks are whole subtrees of the tree over all ranks: consecutive, the same power of
  // two on each host, or fewer on the last. Sums then have the same bits as on one host.
  bool follow_tree() const;
  std::string text() const;  // "2 hosts x 2 ranks", "hosts of 2 and 1 ranks"

 private:
  const int rank_;
  std::vector<int> host_of_, place_of_;
  std::vector<std::vector<int>> ranks_of_;
};

// Describes the order in which such a group sums floating-point numbers.
std::string order_of_sums(const Hosts& hosts);

}  // namespace lockstep::hierarchy

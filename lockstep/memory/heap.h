// Best-fit allocation from regions of memory; adjacent free blocks are merged. Only computes addresses and
// touches no memory. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace lockstep::memory {

class Heap {
 public:
  struct Region {
    char* base = nullptr;
    std::size_t size = 0;
  };
  void add(Region region);
  // unit: alignment of the block's address and length. Null if nothing fits.
  char* take(std::size_t bytes, std::size_t unit);
  bool put(const char* block);                               // False if the block was not taken.
  std::vector<Region> free_regions() const;                  // Regions that are entirely free.
  std::vector<Region> free_blocks(std::size_t least) const;  // Free blocks of at least that many bytes.
  void remove(const Region& region);                         // The region must be entirely free.
  void clear();

  std::size_t held() const { return held_; }
  std::size_t used() const { return used_; }

 private:
  using Address = std::uintptr_t;
  using Blocks = std::map<Address, std::size_t>;  // Address to length.

  void insert_free(Address address, std::size_t length);
  void erase_free(Blocks::iterator block);

  Blocks regions_, free_, taken_;
  std::set<std::pair<std::size_t, Address>> by_length_;  // Of free_.
  std::size_t held_ = 0, used_ = 0;
};

}  // namespace lockstep::memory

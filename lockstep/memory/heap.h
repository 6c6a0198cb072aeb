// Blocks of regions of memory: the smallest that fits is given out, and neighbours that are free are one
// block again. It knows addresses, and touches nothing. One thread at a time.
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
  // unit: what its address and its length are multiples of. Null where nothing fits.
  char* take(std::size_t bytes, std::size_t unit);
  bool put(const char* block);                               // false: it is not one that was taken
  std::vector<Region> free_regions() const;                  // as a whole
  std::vector<Region> free_blocks(std::size_t least) const;  // of so many bytes, at least
  void remove(const Region& region);                         // that is free as a whole
  void clear();

  std::size_t held() const { return held_; }
  std::size_t used() const { return used_; }

 private:
  using Address = std::uintptr_t;
  using Blocks = std::map<Address, std::size_t>;  // address to length

  void insert_free(Address address, std::size_t length);
  void erase_free(Blocks::iterator block);

  Blocks regions_, free_, taken_;
  std::set<std::pair<std::size_t, Address>> by_length_;  // of free_
  std::size_t held_ = 0, used_ = 0;
};

}  // namespace lockstep::memory

#include <lockstep/memory/heap.h>

#include <algorithm>
#include <iterator>

#include <lockstep/memory/align.h>

namespace lockstep::memory {

void Heap::add(Region region) {
  const auto base = reinterpret_cast<Address>(region.base);
  regions_[base] = region.size;
  held_ += region.size;
  insert_free(base, region.size);
}

void Heap::insert_free(Address address, std::size_t length) {
  // Adjacent regions are kept apart, because they are returned one by one.
  const auto region = std::prev(regions_.upper_bound(address));
  auto next = free_.lower_bound(address);
  if (next != free_.end() && next->first == address + length &&
      next->first < region->first + region->second) {
    length += next->second;
    erase_free(next++);
  }
  if (next != free_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == address && before->first >= region->first) {
      address = before->first;
      length += before->second;
      erase_free(before);
    }
  }
  free_.emplace(address, length);
  by_length_.emplace(length, address);
}

void Heap::erase_free(Blocks::iterator block) {
  by_length_.erase({block->second, block->first});
  free_.erase(block);
}

char* Heap::take(std::size_t bytes, std::size_t unit) {
  const auto length = round_up(std::max<std::size_t>(bytes, 1), unit);
  // The smallest block that fits after alignment: small blocks leave unaligned starts.
  const auto fits = [&](const auto& block) {
    return round_up(block.second, unit) - block.second + length <= block.first;
  };
  const auto block = std::find_if(by_length_.lower_bound({length, 0}), by_length_.end(), fits);
  if (block == by_length_.end()) return nullptr;
  const auto [whole, address] = *block;
  const auto start = round_up(address, unit);
  erase_free(free_.find(address));
  if (start != address) insert_free(address, start - address);
  if (const auto rest = address + whole - start - length; rest != 0) insert_free(start + length, rest);
  taken_[start] = length;
  used_ += length;
  return reinterpret_cast<char*>(start);
}

bool Heap::put(const char* block) {
  const auto taken = taken_.find(reinterpret_cast<Address>(block));
  if (taken == taken_.end()) return false;
  const auto [address, length] = *taken;
  taken_.erase(taken);
  used_ -= length;
  insert_free(address, length);
  return true;
}

std::vector<Heap::Region> Heap::free_blocks(std::size_t least) const {
  std::vector<Region> found;
  for (auto each = by_length_.lower_bound({least, 0}); each != by_length_.end(); ++each)
    found.push_back({reinterpret_cast<char*>(each->second), each->first});
  return found;
}

std::vector<Heap::Region> Heap::free_regions() const {
  std::vector<Region> found;
  for (const auto& [base, size] : regions_)
    if (const auto block = free_.find(base); block != free_.end() && block->second == size)
      found.push_back({reinterpret_cast<char*>(base), size});
  return found;
}

void Heap::remove(const Region& region) {
  const auto base = reinterpret_cast<Address>(region.base);
  erase_free(free_.find(base));
  regions_.erase(base);
  held_ -= region.size;
}

void Heap::clear() { *this = {}; }

}  // namespace lockstep::memory

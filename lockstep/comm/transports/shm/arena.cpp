#include <lockstep/comm/transports/shm/arena.h>

#include <pthread.h>

#include <algorithm>

#include <lockstep/base/error.h>
#include <lockstep/comm/transports/shm/align.h>

namespace lockstep::shm {
namespace {

constexpr std::size_t kPage = 4096, kLine = 64;
constexpr std::size_t kSegment = std::size_t{8} << 20;  // the least that is taken at a time
constexpr std::size_t kSpare = std::size_t{256} << 20;  // held though nobody uses it

}  // namespace

Arena& Arena::instance() {
  static auto* arena = [] {
    auto* made = new Arena;
    ::pthread_atfork([] { instance().mutex_->lock(); }, [] { instance().mutex_->unlock(); },
                     [] { instance().after_fork(); });
    return made;
  }();
  return *arena;
}

// The memory is shared with the parent, which goes on to use it: nothing of it is given out or given back
// here.
void Arena::after_fork() {
  (void)mutex_.release();  // it was locked by a thread that is not here
  mutex_ = std::make_unique<std::shared_mutex>();
  by_length_.clear();
  used_.clear();
  for (auto& [base, owned] : segments_) owned.free.clear();
  held_bytes_ = used_bytes_ = 0;
}

void Arena::insert_free(Owned& owned, std::size_t offset, std::size_t length) {
  const auto base = reinterpret_cast<std::uintptr_t>(owned.segment->data());
  auto next = owned.free.lower_bound(offset);
  if (next != owned.free.end() && next->first == offset + length) {
    length += next->second;
    erase_free(owned, next++);
  }
  if (next != owned.free.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      length += before->second;
      erase_free(owned, before);
    }
  }
  owned.free.emplace(offset, length);
  by_length_.emplace(length, base + offset);
}

void Arena::erase_free(Owned& owned, std::map<std::size_t, std::size_t>::iterator block) {
  by_length_.erase({block->second, reinterpret_cast<std::uintptr_t>(owned.segment->data()) + block->first});
  owned.free.erase(block);
}

void* Arena::allocate(std::size_t bytes) {
  const auto unit = bytes >= kPage ? kPage : kLine;
  const auto length = round_up(std::max<std::size_t>(bytes, 1), unit);
  // The smallest that fits, where its start does too: small pieces leave odd starts to large ones.
  auto fits = [&](const auto& block) {
    return round_up(block.second, unit) - block.second + length <= block.first;
  };
  auto find = [&] { return std::find_if(by_length_.lower_bound({length, 0}), by_length_.end(), fits); };
  std::unique_lock lock(*mutex_);
  auto block = find();
  while (block == by_length_.end()) {
    // It may take seconds: others go on meanwhile.
    lock.unlock();
    auto segment = Segment::make(std::max(kSegment, length));
    lock.lock();
    insert_segment(std::move(segment));
    block = find();
  }
  const auto [whole, address] = *block;
  auto& [base, owned] = *std::prev(segments_.upper_bound(address));
  const auto start = round_up(address, unit);
  erase_free(owned, owned.free.find(address - base));
  if (start != address) insert_free(owned, address - base, start - address);
  if (const auto rest = address + whole - start - length; rest != 0)
    insert_free(owned, start + length - base, rest);
  used_[start] = length;
  used_bytes_ += length;
  return reinterpret_cast<void*>(start);
}

void Arena::insert_segment(std::shared_ptr<Segment> segment) {
  const auto base = reinterpret_cast<std::uintptr_t>(segment->data());
  const auto size = segment->size();
  held_bytes_ += size;
  auto& owned = segments_[base];
  owned = {next_id_++, std::move(segment), {}};
  by_id_[owned.id] = base;
  insert_free(owned, 0, size);
}

void Arena::free(void* pointer) noexcept {
  std::unique_lock lock(*mutex_);
  auto used = used_.find(reinterpret_cast<std::uintptr_t>(pointer));
  if (used == used_.end()) return;
  auto& [base, owned] = *std::prev(segments_.upper_bound(used->first));
  insert_free(owned, used->first - base, used->second);
  used_bytes_ -= used->second;
  used_.erase(used);
  give_back_what_is_too_much();
}

void Arena::give_back_what_is_too_much() {
  for (auto each = segments_.begin();
       each != segments_.end() && held_bytes_ - used_bytes_ > std::max(kSpare, used_bytes_ / 2);) {
    Owned& owned = each->second;
    const bool empty = owned.free.size() == 1 && owned.free.begin()->second == owned.segment->size();
    if (!empty) {
      ++each;
      continue;
    }
    erase_free(owned, owned.free.begin());
    held_bytes_ -= owned.segment->size();
    by_id_.erase(owned.id);
    owned.segment->give_back();
    each = segments_.erase(each);
  }
}

Place Arena::find(const void* pointer, std::size_t bytes) const {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  std::shared_lock lock(*mutex_);
  auto above = segments_.upper_bound(address);
  if (above == segments_.begin()) return {};
  const auto& [base, owned] = *std::prev(above);
  if (address + bytes > base + owned.segment->size()) return {};
  return {owned.id, address - base};
}

std::shared_ptr<Segment> Arena::segment(std::uint64_t id) const {
  std::shared_lock lock(*mutex_);
  auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : segments_.at(found->second).segment;
}

Arena::Figures Arena::figures() const {
  std::shared_lock lock(*mutex_);
  return {held_bytes_, used_bytes_, segments_.size()};
}

}  // namespace lockstep::shm

#include <lockstep/comm/transports/shm/engine/arena.h>

#include <pthread.h>

#include <algorithm>

#include <lockstep/base/error.h>
#include <lockstep/memory/align.h>

namespace lockstep::shm {
namespace {

using memory::kPage;
constexpr std::size_t kSegment = std::size_t{8} << 20;  // smallest segment
constexpr std::size_t kSpare = std::size_t{256} << 20;  // most unused memory to keep

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

// The memory is shared with the parent, which keeps using it: nothing is allocated from it or returned here.
void Arena::after_fork() {
  (void)mutex_.release();  // locked by a thread that does not exist here
  mutex_ = std::make_unique<std::shared_mutex>();
  heap_.clear();
}

void* Arena::allocate(std::size_t bytes, bool grow) {
  const auto unit = bytes >= kPage ? kPage : memory::kCacheLine;
  std::unique_lock lock(*mutex_);
  char* block = heap_.take(bytes, unit);
  while (block == nullptr && grow) {
    // May take seconds: other threads continue meanwhile.
    lock.unlock();
    auto segment = Segment::make(std::max(kSegment, memory::round_up(bytes, unit)));
    lock.lock();
    const char* base = segment->data();
    heap_.add({segment->data(), segment->size()});
    by_id_[next_id_] = base;
    segments_[base] = {next_id_++, std::move(segment)};
    block = heap_.take(bytes, unit);
  }
  return block;
}

void Arena::free(void* pointer) noexcept {
  std::unique_lock lock(*mutex_);
  if (heap_.put(static_cast<const char*>(pointer))) give_back_what_is_too_much();
}

void Arena::give_back_what_is_too_much() {
  const auto too_much = [&] { return heap_.held() - heap_.used() > std::max(kSpare, heap_.used() / 2); };
  if (!too_much()) return;
  for (const auto& region : heap_.free_regions()) {
    if (!too_much()) return;
    heap_.remove(region);
    const auto owned = segments_.find(region.base);
    by_id_.erase(owned->second.id);
    owned->second.segment->give_back();
    segments_.erase(owned);
  }
}

Place Arena::find(const void* pointer, std::size_t bytes) const {
  const auto* address = static_cast<const char*>(pointer);
  std::shared_lock lock(*mutex_);
  auto above = segments_.upper_bound(address);
  if (above == segments_.begin()) return {};
  const auto& [base, owned] = *std::prev(above);
  if (address + bytes > base + owned.segment->size()) return {};
  return {owned.id, static_cast<std::uint64_t>(address - base)};
}

std::shared_ptr<Segment> Arena::segment(std::uint64_t id) const {
  std::shared_lock lock(*mutex_);
  auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : segments_.at(found->second).segment;
}

Arena::Figures Arena::figures() const {
  std::shared_lock lock(*mutex_);
  return {heap_.held(), heap_.used(), segments_.size()};
}

}  // namespace lockstep::shm

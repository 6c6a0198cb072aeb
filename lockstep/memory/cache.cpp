#include <lockstep/memory/cache.h>

#include <algorithm>
#include <bit>
#include <utility>

#include <fmt/format.h>
#include <lockstep/memory/align.h>
#include <lockstep/memory/fork.h>
#include <lockstep/os/host.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(memory, bytes) ((void)(memory), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(memory, bytes) ((void)(memory), (void)(bytes))
#endif

namespace lockstep::memory {
namespace {

constexpr std::size_t kSlab = std::size_t{256} << 10;  // Divided into small blocks.
constexpr std::size_t kLargestSmall = std::size_t{32} << 10;
constexpr std::uint32_t kMagic = 0x10c557e9;
constexpr std::chrono::seconds kRelease(10);

}  // namespace

struct alignas(Cache::kAlignment) Cache::Header {
  Cache* owner = nullptr;
  std::size_t length = 0;    // Of the block, including this header.
  std::size_t bytes = 0;     // As requested.
  Header* next = nullptr;    // Used while the block is free.
  std::uint32_t number = 0;  // Size class; kClasses: a large block.
  std::uint32_t magic = kMagic;

  char* data() { return reinterpret_cast<char*>(this) + sizeof(Header); }
  static Header* of(void* memory) {
    return reinterpret_cast<Header*>(static_cast<char*>(memory) - sizeof(Header));
  }
};

// Small blocks cached by a thread and returned to the shared bins when it ends. Blocks freed after that go to
// the shared bins at once.
struct Cache::Bins {
  Cache* owner = nullptr;
  Bin bins[kClasses];
  enum class State : char { fresh, alive, ended };
  static thread_local State state;

  Bins() { state = State::alive; }
  ~Bins() {
    state = State::ended;
    if (owner == nullptr) return;
    std::lock_guard lock(owner->mutex_);
    for (std::size_t number = 0; number < kClasses; ++number)
      while (Header* block = bins[number].first) {
        bins[number].first = block->next;
        block->next = std::exchange(owner->central_[number].first, block);
      }
  }
};

thread_local Cache::Bins::State Cache::Bins::state = Cache::Bins::State::fresh;

Cache::Bins& Cache::bins() {
  thread_local Bins bins;
  return bins;
}

// Size classes 128, 192, ... 1024, then four per doubling: at most a quarter of a block is wasted.
std::size_t Cache::class_of(std::size_t length) {
  if (length <= 1024) return length <= 128 ? 0 : (length + 63) / 64 - 2;
  const auto doubling = static_cast<std::size_t>(std::bit_width(length - 1)) - 1;  // 2^doubling < length
  const auto quarter = (length - 1 - (std::size_t{1} << doubling)) >> (doubling - 2);
  return 15 + (doubling - 10) * 4 + quarter;
}

std::size_t Cache::length_of(std::size_t number) {
  if (number < 15) return (number + 2) * 64;
  const auto doubling = (number - 15) / 4 + 10, quarter = (number - 15) % 4;
  return (std::size_t{1} << doubling) + (quarter + 1) * (std::size_t{1} << (doubling - 2));
}

// Number of blocks moved between a thread and the shared bins at a time.
std::size_t Cache::batch_of(std::size_t number) {
  return std::clamp<std::size_t>((std::size_t{32} << 10) / length_of(number), 2, 64);
}

Cache::Cache(Source& source, Usage* usage)
    : source_(source), usage_(usage), next_release_(Clock::now() + kRelease) {
  hold_in_fork(mutex_, ForkOrder::outer);
}

void* Cache::allocate(std::size_t bytes) {
  if (bytes > SIZE_MAX / 2) throw Error("cannot allocate a tensor of " + std::to_string(bytes) + " bytes");
  LOCKSTEP_ASSERT(!is_disowned(), "the memory is shared with the parent process");
  const auto length = bytes + sizeof(Header);
  bool hit = true;
  Header* block = length <= kLargestSmall ? take_small(class_of(length), hit) : take_large(length, hit);
  block->bytes = bytes;
  const auto counted = static_cast<std::int64_t>(bytes);
  allocated_.fetch_add(counted, std::memory_order_relaxed);
  if (usage_ != nullptr) usage_->add(counted);
  allocations_.fetch_add(1, std::memory_order_relaxed);
  if (hit) hits_.fetch_add(1, std::memory_order_relaxed);
  ASAN_UNPOISON_MEMORY_REGION(block->data(), bytes);
  return block->data();
}

void Cache::free(void* memory) noexcept {
  if (memory == nullptr) return;
  Header* block = Header::of(memory);
  LOCKSTEP_ASSERT(block->magic == kMagic, "freed memory was overwritten, or is not the allocator's");
  Cache& cache = *block->owner;
  if (cache.is_disowned()) return;
  const auto counted = static_cast<std::int64_t>(block->bytes);
  cache.allocated_.fetch_sub(counted, std::memory_order_relaxed);
  if (cache.usage_ != nullptr) cache.usage_->allocated.fetch_sub(counted, std::memory_order_relaxed);
  ASAN_POISON_MEMORY_REGION(memory, block->length - sizeof(Header));
  if (block->number < kClasses)
    cache.keep_small(block);
  else
    cache.keep_large(block);
}

char* Cache::take_new(std::size_t bytes) {
  try {
    return source_.take(bytes, /*grow=*/true);
  } catch (const OutOfMemory&) {
    release_all();
  }
  try {
    return source_.take(bytes, /*grow=*/true);
  } catch (const OutOfMemory& why) {
    const auto now = figures();
    throw OutOfMemory(fmt::format("cannot allocate {} for a tensor: {} in use, {} reserved in all: {}",
                                  host::bytes_text(bytes),
                                  host::bytes_text(static_cast<std::uint64_t>(now.allocated)),
                                  host::bytes_text(static_cast<std::uint64_t>(now.reserved)), why.what()));
  }
}

// ---- small ------------------------------------------------------------------------------------------------

Cache::Header* Cache::take_small(std::size_t number, bool& hit) {
  const auto take = [](Bin& bin) {
    Header* block = bin.first;
    bin.first = block->next;
    --bin.count;
    return block;
  };
  if (Bins::state != Bins::State::ended) {
    auto& mine = bins();
    if (mine.owner == nullptr) mine.owner = this;
    if (mine.owner == this) {
      auto& bin = mine.bins[number];
      if (bin.first == nullptr) hit = fill(bin, number, batch_of(number));
      return take(bin);
    }
  }
  Bin one;
  hit = fill(one, number, 1);
  return take(one);
}

bool Cache::fill(Bin& bin, std::size_t number, std::size_t count) {
  const auto length = length_of(number);
  std::unique_lock lock(mutex_);
  auto& central = central_[number];
  const bool had = central.first != nullptr;
  if (!had) {
    lock.unlock();
    char* slab = take_new(kSlab);
    ASAN_POISON_MEMORY_REGION(slab, kSlab);
    lock.lock();
    for (std::size_t at = 0; at + length <= kSlab; at += length) {
      ASAN_UNPOISON_MEMORY_REGION(slab + at, sizeof(Header));
      auto* block = new (slab + at)
          Header{.owner = this, .length = length, .number = static_cast<std::uint32_t>(number)};
      block->next = std::exchange(central.first, block);
    }
  }
  for (; count > 0 && central.first != nullptr; --count) {
    Header* block = central.first;
    central.first = block->next;
    block->next = std::exchange(bin.first, block);
    ++bin.count;
  }
  return had;
}

void Cache::keep_small(Header* block) noexcept {
  const auto number = block->number;
  if (Bins::state == Bins::State::alive) {
    auto& mine = bins();
    if (mine.owner == this) {
      auto& bin = mine.bins[number];
      block->next = std::exchange(bin.first, block);
      if (++bin.count <= 2 * batch_of(number)) return;
      std::lock_guard lock(mutex_);
      for (auto count = batch_of(number); count > 0; --count) {
        Header* other = bin.first;
        bin.first = other->next;
        --bin.count;
        other->next = std::exchange(central_[number].first, other);
      }
      return;
    }
  }
  std::lock_guard lock(mutex_);
  block->next = std::exchange(central_[number].first, block);
}

// ---- large ------------------------------------------------------------------------------------------------

Cache::Header* Cache::take_large(std::size_t length, bool& hit) {
  length = round_up(length, kPage);
  std::unique_lock lock(mutex_);
  // A slightly longer block fits, too.
  if (const auto kept = large_.lower_bound(length);
      kept != large_.end() && kept->first <= length + length / 8) {
    Header* block = kept->second.back().block;
    kept->second.pop_back();
    if (kept->second.empty()) large_.erase(kept);
    return block;
  }
  hit = false;
  lock.unlock();
  char* memory = source_.take(length, /*grow=*/false);
  if (memory == nullptr) {
    // With many different sizes, free blocks make room for this one before more memory is taken.
    lock.lock();
    release_large(UINT64_MAX);
    lock.unlock();
    memory = take_new(length);
  }
  return new (memory) Header{.owner = this, .length = length, .number = kClasses};
}

void Cache::keep_large(Header* block) noexcept {
  std::lock_guard lock(mutex_);
  large_[block->length].push_back({block, releases_});
  if (++calls_ % 64 == 0) release_in_time(Clock::now());
}

void Cache::release_large(std::uint64_t before) {
  for (auto each = large_.begin(); each != large_.end();) {
    std::erase_if(each->second, [&](const Kept& kept) {
      if (kept.since >= before) return false;
      char* memory = reinterpret_cast<char*>(kept.block);
      ASAN_UNPOISON_MEMORY_REGION(memory, kept.block->length);
      source_.give(memory);
      return true;
    });
    each = each->second.empty() ? large_.erase(each) : std::next(each);
  }
}

void Cache::release_in_time(Clock::time_point now) {
  if (now < next_release_) return;
  next_release_ = now + kRelease;
  release_large(releases_++);
  source_.trim();
}

void Cache::release_unused() {
  std::lock_guard lock(mutex_);
  release_large(releases_++);
  source_.trim();
}

void Cache::release_all() {
  std::lock_guard lock(mutex_);
  release_large(UINT64_MAX);
  source_.trim();
}

Cache::Figures Cache::figures() const {
  return {.allocated = allocated_.load(),
          .reserved = static_cast<std::int64_t>(source_.held()),
          .allocations = allocations_.load(),
          .hits = hits_.load()};
}

void Cache::disown() {
  disowned_ = true;
  for (auto& each : central_) each = {};
  large_.clear();
}

}  // namespace lockstep::memory

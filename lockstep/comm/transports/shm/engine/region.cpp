#include <lockstep/comm/transports/shm/engine/region.h>

#include <algorithm>
#include <cstring>
#include <new>

#include <lockstep/memory/align.h>

namespace lockstep::shm {

using memory::round_up;

namespace {

constexpr std::size_t kSlotAlignment = 128;

}  // namespace

std::size_t Region::data_size(int ranks) {
  return round_up(std::max(kInline, detail::packed_size(ranks) + kRefusal), kSlotAlignment);
}

std::size_t Region::slot_size(int ranks) {
  return round_up(sizeof(Header) + 2 * sizeof(std::int64_t) * static_cast<std::size_t>(ranks),
                  kSlotAlignment) +
         data_size(ranks);
}

std::size_t Region::channels_at(int ranks) {
  return sizeof(Shared) + 2 * sizeof(Claims) +
         (sizeof(Line) + 2 * slot_size(ranks)) * static_cast<std::size_t>(ranks);
}

std::size_t Region::size_for(int ranks) {
  return channels_at(ranks) + sizeof(Channel) * static_cast<std::size_t>(ranks * ranks);
}

void Region::prepare() {
  std::memset(static_cast<void*>(memory_), 0, size_for(ranks_));
  new (memory_) Shared{};
  for (std::uint64_t parity : {0u, 1u}) new (&claims(parity)) Claims{};
  pthread_mutexattr_t shared;
  ::pthread_mutexattr_init(&shared);
  ::pthread_mutexattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
  ::pthread_mutexattr_setrobust(&shared, PTHREAD_MUTEX_ROBUST);
  for (int r = 0; r < ranks_; ++r) {
    new (&line(r)) Line{};
    ::pthread_mutex_init(&line(r).alive, &shared);
  }
  ::pthread_mutexattr_destroy(&shared);
}

}  // namespace lockstep::shm

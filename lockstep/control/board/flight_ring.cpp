#include <lockstep/control/board/flight_ring.h>

#include <limits>

#include <lockstep/control/wire/messages.h>

namespace lockstep::control {
namespace {

// Latest time of the monotonic clock that can also be expressed since 1970.
constexpr std::int64_t kLastNs = std::numeric_limits<std::int64_t>::max() / 2;

constexpr std::uint64_t version_of(std::uint64_t ticket) { return 2 * ticket + 2; }

// Files must hold text: any other byte comes from a stray write.
template <std::size_t N>
std::string printable_text(const char (&from)[N]) {
  std::string found(from, ::strnlen(from, N));
  for (char& c : found)
    if (c < ' ' || c > '~') c = '?';
  return found;
}

}  // namespace

FlightRing::Ticket FlightRing::begin(const Begun& begun, const CallTexts& texts, std::int64_t step) noexcept {
  const auto ticket = next_.load(std::memory_order_relaxed);
  Slot& slot = slots_[ticket % kSlots];
  const Record record{.key = begun.key,
                      .sequence = begun.sequence,
                      .step = step,
                      .count = begun.count,
                      .bytes = begun.bytes,
                      .began_ns = in_ns(begun.at),
                      .peer = begun.peer,
                      .message = begun.message ? 1 : 0,
                      .texts = texts};
  std::uint64_t words[kWords];
  std::memcpy(words, &record, sizeof record);
  slot.version.store(version_of(ticket) - 1, std::memory_order_relaxed);
  // Released, so that a reader that sees a new word also sees the odd version.
  slot.end.store(0, std::memory_order_release);
  for (std::size_t i = 0; i < kWords; ++i) slot.words[i].store(words[i], std::memory_order_release);
  slot.version.store(version_of(ticket), std::memory_order_release);
  next_.store(ticket + 1, std::memory_order_release);
  // Prefetch the next slot, which has left the cache by the time it is needed.
  const Slot& following = slots_[(ticket + 1) % kSlots];
  for (std::size_t at = 0; at < sizeof(Slot); at += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(&following) + at, 1);
  return ticket;
}

void FlightRing::end(Ticket ticket, std::int64_t now_ns, bool failed) noexcept {
  if (ticket == kNone) return;
  Slot& slot = slots_[ticket % kSlots];
  // The slot has been reused.
  if (slot.version.load(std::memory_order_relaxed) != version_of(ticket)) return;
  slot.end.store(failed ? -now_ns : now_ns, std::memory_order_release);
}

FlightLog FlightRing::read() const {
  FlightLog log;
  const auto next = next_.load(std::memory_order_acquire);
  log.begun = static_cast<std::int64_t>(next & ~(std::uint64_t{1} << 63));
  for (auto ticket = next > kKept ? next - kKept : 0; ticket < next; ++ticket) {
    const Slot& slot = slots_[ticket % kSlots];
    const auto before = slot.version.load(std::memory_order_acquire);
    std::uint64_t words[kWords];
    for (std::size_t i = 0; i < kWords; ++i) words[i] = slot.words[i].load(std::memory_order_acquire);
    const auto end = slot.end.load(std::memory_order_acquire);
    if (before != version_of(ticket) || slot.version.load(std::memory_order_relaxed) != before) continue;
    Record record;
    std::memcpy(&record, words, sizeof record);
    if (record.sequence < 0 || record.step < -1 || record.count < 0 || record.bytes < 0 || record.peer < -1 ||
        record.peer >= kMostRanks || record.began_ns < 0 || record.began_ns > kLastNs || end < -kLastNs ||
        end > kLastNs)
      continue;
    log.entries.push_back({.key = record.key,
                           .message = record.message != 0,
                           .operation = printable_text(record.texts.operation),
                           .dtype = printable_text(record.texts.dtype),
                           .reduction = printable_text(record.texts.reduction),
                           .site = printable_text(record.texts.site),
                           .sequence = record.sequence,
                           .step = record.step,
                           .count = record.count,
                           .bytes = record.bytes,
                           .peer = record.peer,
                           .began_ns = record.began_ns,
                           .ended_ns = end < 0 ? -end : end,
                           .failed = end < 0});
  }
  return log;
}

}  // namespace lockstep::control

#include <lockstep/control/board/flight.h>

#include <algorithm>
#include <limits>

namespace lockstep::control {
namespace {

constexpr std::size_t kMostError = 4096;

}  // namespace

std::string RankFlight::encode(std::size_t most) const {
  Writer out;
  out.number(pid).number(ended ? 1 : 0);
  if (ended) out.text(control::encode(*ended));
  const auto count = std::min({log.entries.size(), most, std::size_t{FlightRing::kKept}});
  out.text(error.substr(0, kMostError)).number(log.begun).number(static_cast<std::int64_t>(count));
  for (auto entry = log.entries.end() - static_cast<std::ptrdiff_t>(count); entry != log.entries.end();
       ++entry)
    out.number(entry->key)
        .number(entry->message)
        .text(entry->operation)
        .text(entry->dtype)
        .text(entry->reduction)
        .text(entry->site)
        .number(entry->sequence)
        .number(entry->step)
        .number(entry->count)
        .number(entry->bytes)
        .number(entry->peer)
        .number(entry->began_ns)
        .number(entry->ended_ns)
        .number(entry->failed);
  return out.take();
}

RankFlight RankFlight::decode(std::string_view payload) {
  Reader in(payload);
  RankFlight flight;
  flight.pid = in.integer(0, std::numeric_limits<int>::max());
  if (in.number(0, 1) != 0) flight.ended = decode_ended(in.text());
  flight.error = in.text(kMostError);
  flight.log.begun = in.number_from(0);
  for (auto left = in.number(0, FlightRing::kKept); left > 0; --left) {
    FlightEntry entry;
    entry.key = in.number();
    entry.message = in.number(0, 1) != 0;
    entry.operation = in.text(sizeof CallTexts::operation);
    entry.dtype = in.text(sizeof CallTexts::dtype);
    entry.reduction = in.text(sizeof CallTexts::reduction);
    entry.site = in.text(sizeof CallTexts::site);
    entry.sequence = in.number_from(0);
    entry.step = in.number_from(-1);
    entry.count = in.number_from(0);
    entry.bytes = in.number_from(0);
    entry.peer = in.integer(-1, kMostRanks - 1);
    entry.began_ns = in.number_from(0);
    entry.ended_ns = in.number_from(0);
    entry.failed = in.number(0, 1) != 0;
    flight.log.entries.push_back(std::move(entry));
  }
  in.end();
  return flight;
}

}  // namespace lockstep::control

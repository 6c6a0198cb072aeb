#include <lockstep/profile/record/activities.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <optional>
#include <unordered_map>

#include <fmt/format.h>
#include <lockstep/profile/record/intervals.h>

namespace lockstep::profile {

namespace {

template <typename Clock>
std::int64_t now() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

// Relative difference above which a clock was set between two readings rather than slewed.
constexpr double kMostSlewed = 0.001;

class Names {
 public:
  explicit Names(std::vector<std::string>& names) : names_(names) {
    for (std::size_t i = 0; i < names.size(); ++i) numbers_.emplace(names[i], static_cast<std::int32_t>(i));
  }
  std::int32_t number(const std::string& name) {
    const auto [place, is_new] = numbers_.try_emplace(name, static_cast<std::int32_t>(names_.size()));
    if (is_new) names_.push_back(name);
    return place->second;
  }

 private:
  std::vector<std::string>& names_;
  std::unordered_map<std::string, std::int32_t> numbers_;
};

std::optional<std::int32_t> thread_of(const RankProfile& profile, std::int64_t id) {
  const auto found = std::find(profile.thread_ids.begin(), profile.thread_ids.end(), id);
  if (found == profile.thread_ids.end()) return std::nullopt;
  return static_cast<std::int32_t>(found - profile.thread_ids.begin());
}

// Nests the spans of each thread. They come from two clocks, so one may seem to end after the span that
// contains it; it is shortened then. Step borders, which have no length, stay in place.
void nest(std::vector<Event>& events) {
  std::stable_sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
    if (a.thread != b.thread) return a.thread < b.thread;
    return a.begin != b.begin ? a.begin < b.begin : a.end > b.end;
  });
  std::vector<const Event*> open;
  for (auto& event : events) {
    while (!open.empty() && (open.back()->thread != event.thread || open.back()->end <= event.begin))
      open.pop_back();
    if (!open.empty()) event.end = std::min(event.end, open.back()->end);
    event.depth = static_cast<std::int32_t>(open.size());
    if (event.end > event.begin) open.push_back(&event);
  }
}

// Spans of each thread, for checking whether a time is inside one.
std::vector<Intervals> spans_by_thread(const RankProfile& profile) {
  std::vector<Intervals> all(profile.threads.size());
  for (const auto& event : profile.events)
    all[static_cast<std::size_t>(event.thread)].push_back({event.begin, event.end});
  for (auto& each : all) each = united(std::move(each));
  return all;
}

}  // namespace

ClockPair clock_pair() noexcept {
  // Of several attempts, take the one with the closest readings, during which the thread was not preempted.
  ClockPair best;
  auto least = std::numeric_limits<std::int64_t>::max();
  for (int i = 0; i < 50; ++i) {
    const auto before = now<std::chrono::steady_clock>();
    const auto epoch = now<std::chrono::system_clock>();
    const auto after = now<std::chrono::steady_clock>();
    if (after - before >= least) continue;
    least = after - before;
    best = {before + (after - before) / 2, epoch};
  }
  return best;
}

EpochClock::EpochClock(ClockPair first, ClockPair last) : first_(first) {
  if (last.epoch <= first.epoch) return;
  const auto rate =
      static_cast<double>(last.steady - first.steady) / static_cast<double>(last.epoch - first.epoch);
  if (rate > 1 - kMostSlewed && rate < 1 + kMostSlewed) rate_ = rate;
}

std::int64_t EpochClock::steady(std::int64_t epoch) const {
  return first_.steady + static_cast<std::int64_t>(static_cast<double>(epoch - first_.epoch) * rate_);
}

void add_operators(RankProfile& profile, const Activities& activities, const EpochClock& clock) {
  Names names(profile.names);
  for (const auto& each : activities.operators) {
    Event event{.kind = SpanKind::operation};
    event.begin = clock.steady(each.begin) - profile.origin;
    event.end = std::max(event.begin, clock.steady(each.end) - profile.origin);
    if (event.begin < 0) continue;
    if (const auto known = thread_of(profile, each.thread)) {
      event.thread = *known;
    } else {
      event.thread = static_cast<std::int32_t>(profile.threads.size());
      profile.threads.push_back(fmt::format("thread {}", each.thread));
      profile.thread_ids.push_back(each.thread);
    }
    event.name = names.number(each.name);
    profile.events.push_back(event);
  }
  nest(profile.events);
}

void add_device(RankProfile& profile, const Activities& activities, const EpochClock& clock) {
  if (activities.device.empty()) return;
  Names names(profile.names);
  std::unordered_map<std::uint64_t, const OperatorActivity*> operators;
  for (const auto& each : activities.operators) operators.emplace(each.correlation, &each);
  std::unordered_map<std::uint64_t, const LaunchActivity*> launches;
  for (const auto& each : activities.launches) launches.emplace(each.correlation, &each);
  const auto spans = spans_by_thread(profile);
  const auto last =
      profile.steps.empty() ? std::numeric_limits<std::int64_t>::max() : profile.steps.back().end;
  std::map<std::pair<int, std::int64_t>, std::int32_t> rows;  // ordered by device and stream
  for (const auto& each : activities.device) rows.emplace(std::pair{each.device, each.stream}, 0);
  for (auto& [which, row] : rows) {
    row = static_cast<std::int32_t>(profile.device_rows.size());
    profile.device_rows.push_back({which.first, which.second});
  }

  const auto inside = [&](DeviceEvent& event, std::int64_t thread, std::int64_t time) {
    const auto known = thread_of(profile, thread);
    if (!known || covered(spans[static_cast<std::size_t>(*known)], time, time + 1) == 0) return false;
    event.thread = *known;
    event.launched = time;
    return true;
  };
  for (const auto& each : activities.device) {
    DeviceEvent event{.kind = each.kind};
    event.begin = clock.steady(each.begin) - profile.origin;
    event.end = std::max(event.begin, clock.steady(each.end) - profile.origin);
    if (event.begin < 0 || event.begin >= last) continue;
    event.name = names.number(each.name);
    event.row = rows.at({each.device, each.stream});
    if (const auto found = operators.find(each.linked); each.linked != 0 && found != operators.end()) {
      const auto& by = *found->second;
      event.launched_by = names.number(by.name);
      // Use the launch call if it is known, else the operator's middle: its ends, seen by another clock, may
      // lie outside the span.
      const auto call = launches.find(each.correlation);
      if (call == launches.end() || call->second->thread != by.thread ||
          !inside(event, by.thread, clock.steady(call->second->begin) - profile.origin))
        inside(event, by.thread, clock.steady(by.begin + (by.end - by.begin) / 2) - profile.origin);
    }
    profile.device.push_back(event);
  }
  std::stable_sort(profile.device.begin(), profile.device.end(),
                   [](const auto& a, const auto& b) { return a.begin < b.begin; });
}

}  // namespace lockstep::profile

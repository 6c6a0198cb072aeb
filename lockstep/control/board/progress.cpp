#include <lockstep/control/board/progress.h>

#include <algorithm>
#include <array>
#include <bit>
#include <string>
#include <utility>

namespace lockstep::control {
namespace {

// A report covers at least half of this time. A cgroup throttles a rank in periods of 100 ms, so less says
// nothing. And agents look every 100 ms, at different moments on different hosts: the last 16 reports of all
// ranks overlap.
constexpr std::int64_t kTogether = 128'000'000;
constexpr std::int64_t kOverdue = 4 * kTogether;  // For step numbers that are multiples of nothing.
// From this time on, a step that takes twice as long as usual is reported by itself.
constexpr std::int64_t kTellsByItself = kTogether / 8;

// Shortens a long name in the middle, so that "evaluation/accuracy/top1" and ".../top5" stay distinct. Does
// not split characters.
std::string shortened(std::string_view name, std::size_t most) {
  if (name.size() <= most) return std::string(name);
  const auto continues = [&](std::size_t at) {
    return at < name.size() && (static_cast<unsigned char>(name[at]) & 0xc0) == 0x80;
  };
  auto head = (most - 2) / 2, tail = name.size() - (most - 2 - head);
  while (head > 0 && continues(head)) --head;
  while (continues(tail)) ++tail;
  return std::string(name.substr(0, head)) + ".." + std::string(name.substr(tail));
}

}  // namespace

// A reader that finds a word of the next write in the entry also finds the new count, and skips the entry.
void StepRecord::add(const StepTime& time) {
  const auto count = count_.load(std::memory_order_relaxed);
  Time& place = times_[count % kTimes];
  place.step.store(time.step, std::memory_order_release);
  place.steps.store(time.steps, std::memory_order_release);
  place.took_us.store(time.took_us, std::memory_order_release);
  place.waited_us.store(time.waited_us, std::memory_order_release);
  count_.store(count + 1, std::memory_order_release);
}

std::vector<StepTime> StepRecord::times(std::uint64_t& seen) const {
  const auto count = count_.load(std::memory_order_acquire);
  if (seen > count) seen = 0;  // The page now belongs to another process.
  const auto first = std::max(seen, count - std::min<std::uint64_t>(count, kTimes));
  std::vector<StepTime> times;
  for (auto i = first; i < count; ++i) {
    const Time& place = times_[i % kTimes];
    StepTime time;
    time.step = place.step.load(std::memory_order_acquire);
    time.steps = place.steps.load(std::memory_order_acquire);
    time.took_us = place.took_us.load(std::memory_order_acquire);
    time.waited_us = place.waited_us.load(std::memory_order_acquire);
    times.push_back(time);
  }
  // Entries that may have been overwritten meanwhile: of a full ring also the first, before the count
  // changes.
  const auto after = count_.load(std::memory_order_relaxed);
  const auto intact = after >= kTimes ? after - kTimes + 1 : 0;
  if (intact > first)
    times.erase(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(
                                                   std::min<std::uint64_t>(intact - first, times.size())));
  seen = count;
  constexpr std::int64_t kMost = std::int64_t{1} << 50;
  for (StepTime& time : times) {  // Guards against a stray write of the program.
    time.step = std::max<std::int64_t>(time.step, -1);
    time.steps = std::clamp<std::int64_t>(time.steps, 1, kMost);
    time.took_us = std::clamp<std::int64_t>(time.took_us, 0, kMost);
    time.waited_us = std::clamp<std::int64_t>(time.waited_us, 0, time.took_us);
  }
  return times;
}

void StepRecord::metric(std::string_view name, double value, std::int64_t step) {
  std::array<char, kName> cut{};
  const auto shown = shortened(name, kName - 1);
  std::copy(shown.begin(), shown.end(), cut.begin());
  std::size_t at = name == "loss" ? 0 : name == "samples" ? 1 : 2;
  for (; at < kMetrics; ++at) {
    Slot& slot = metrics_[at];
    if (slot.used.load(std::memory_order_relaxed) == 0) {
      for (std::size_t i = 0; i < kName; ++i) slot.name[i].store(cut[i], std::memory_order_relaxed);
      slot.used.store(1, std::memory_order_release);
    } else if (at >= 2 && !std::equal(cut.begin(), cut.end(), slot.name, [](char one, const auto& other) {
                 return one == other.load(std::memory_order_relaxed);
               })) {
      continue;
    }
    slot.value.store(value, std::memory_order_relaxed);
    slot.step.store(step, std::memory_order_relaxed);
    return;
  }
}

std::vector<Metric> StepRecord::metrics() const {
  std::vector<Metric> metrics;
  for (const Slot& slot : metrics_) {
    if (slot.used.load(std::memory_order_acquire) == 0) continue;
    Metric metric;
    for (std::size_t i = 0; i + 1 < kName; ++i) {
      const char c = slot.name[i].load(std::memory_order_relaxed);
      if (c == 0) break;
      metric.name += c;
    }
    metric.value = slot.value.load(std::memory_order_relaxed);
    metric.step = std::max<std::int64_t>(slot.step.load(std::memory_order_relaxed), -1);
    metrics.push_back(std::move(metric));
  }
  return metrics;
}

void StepTimer::waited(std::int64_t now) {
  if (waits_since_ < 0) return;
  waited_ += std::max<std::int64_t>(0, now - waits_since_);
  waits_since_ = -1;
}

StepTimer::Times StepTimer::step(std::int64_t step, std::int64_t now) {
  if (step_ < 0 || !is_of_this_thread()) {
    *this = {};
    thread_ = std::this_thread::get_id();
    step_ = step;
    begun_ = last_ = now;
    return {};
  }
  if (step == step_) return {};
  Times times;
  const auto took = std::max<std::int64_t>(1, now - last_);
  if (steps_ > 0 && usual_ >= kTellsByItself && took >= 2 * usual_)
    times[0] = tell(before_, last_, waited_before_);
  const auto ended = std::exchange(step_, step);
  ++steps_;
  usual_ = usual_ == 0 ? took : (7 * usual_ + took) / 8;
  const auto together = std::bit_floor(
      static_cast<std::uint64_t>(std::max<std::int64_t>(1, kTogether / std::max(usual_, took))));
  const bool aligned = static_cast<std::uint64_t>(ended + 1) % together == 0;
  if (aligned || step < ended || times[0] || now - begun_ >= kOverdue) times[1] = tell(ended, now, waited_);
  before_ = ended;
  last_ = now;
  waited_before_ = waited_;
  return times;
}

StepTime StepTimer::tell(std::int64_t last, std::int64_t until, std::int64_t waited) {
  StepTime time{
      .step = last, .steps = steps_, .took_us = (until - begun_) / 1000, .waited_us = waited / 1000};
  time.waited_us = std::min(time.waited_us, time.took_us);
  begun_ = until;
  steps_ = 0;
  waited_ -= waited;
  waited_before_ = 0;
  return time;
}

}  // namespace lockstep::control

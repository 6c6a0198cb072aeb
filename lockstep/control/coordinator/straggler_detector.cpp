#include <lockstep/control/coordinator/straggler_detector.h>

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

namespace lockstep::control {
namespace {

constexpr double kFactor = 2;
constexpr double kFineFactor = 1.5;  // Below this factor a rank is no longer slow.
constexpr int kFineSteps = 5;
constexpr double kOwnFactor = 1.25;
constexpr int kFirst = 3;           // Warm-up: the first steps include one-time work.
constexpr std::size_t kKnown = 8;   // Number of steps after which the usual time is known.
constexpr std::size_t kUsual = 32;  // The usual time is the median of this many steps.
// Differences below these do not matter, or occur on any busy machine: per step, and in one report in total.
constexpr double kLeastUs = 2000, kLeastTogetherUs = 5000, kLeastCrowdedUs = 200'000;
constexpr int kInARow = 3;
constexpr double kChance = 3e-7;  // Probability of that many long steps in a row without a cause.
constexpr std::size_t kWaiting = 64;
constexpr double kRecentUs = 2e6;  // Window for the steps per second.

std::string in_milliseconds(double us) {
  return us < 9950 ? fmt::format("{:.1f} ms", us / 1000) : fmt::format("{:.0f} ms", us / 1000);
}

std::string times(double ratio) {
  return ratio < 100 ? fmt::format("{:.1f} times as long", ratio) : "more than 100 times as long";
}

// Median of all values in `sorted` except the one at `place`.
double middle_of_others(const std::vector<double>& sorted, std::size_t place) {
  const auto at = (sorted.size() - 1) / 2;
  return sorted[place <= at ? at + 1 : at];
}

}  // namespace

void StragglerDetector::note(int number, const StepTime& time) {
  Rank& rank = ranks_[number];
  if (time.step <= rank.last.second) ++rank.round;
  rank.last = {rank.round, time.step};
  const auto steps = static_cast<double>(std::max<std::int64_t>(1, time.steps));
  const auto took = static_cast<double>(time.took_us), waited = static_cast<double>(time.waited_us);
  rank.waiting.push_back(
      {rank.last, steps, took / steps, std::max(0.0, took - waited) / steps, waited / steps});
  if (rank.waiting.size() <= kWaiting) return;
  // A rank makes no more steps: stop waiting for it.
  rank.waiting.pop_front();
  const Key oldest = rank.waiting.front().key;
  std::erase_if(ranks_, [&](const auto& each) { return each.second.last < oldest; });
  // The rank may return, and counts its rounds from 0: so must all.
  for (auto& [each, other] : ranks_) {
    other.round = 0;
    other.last = {0, -1};
    other.waiting.clear();
  }
}

void StragglerDetector::forget(int rank) { ranks_.erase(rank); }

std::vector<std::string> StragglerDetector::judge() {
  std::vector<std::string> lines;
  if (ranks_.size() < 2) {
    for (auto& [number, rank] : ranks_) rank.waiting.clear();
    return lines;
  }
  Key all_have = ranks_.begin()->second.last;
  for (const auto& [number, rank] : ranks_) all_have = std::min(all_have, rank.last);
  std::map<Key, std::vector<Share>> steps;
  for (auto& [number, rank] : ranks_)
    for (const Entry& entry : rank.waiting)
      if (entry.key <= all_have) steps[entry.key].push_back({&rank, number, &entry, entry.busy_us});
  for (auto& [key, shares] : steps)
    if (shares.size() == ranks_.size()) compare(shares, lines);
  for (auto& [number, rank] : ranks_)
    while (!rank.waiting.empty() && rank.waiting.front().key <= all_have) rank.waiting.pop_front();
  return lines;
}

void StragglerDetector::compare(std::vector<Share>& shares, std::vector<std::string>& lines) {
  double took = 0, waited = 0;
  for (const Share& share : shares) {
    took += share.entry->took_us;
    waited += share.entry->waited_us;
    double& busy = share.rank->busy;
    busy = busy < 0 ? share.entry->busy_us : busy + (share.entry->busy_us - busy) / 4;
  }
  if (took > 0) waiting_ = waiting_ < 0 ? waited / took : waiting_ + (waited / took - waiting_) / 4;
  const double steps = shares.front().entry->steps;
  recent_.emplace_back(steps, took / static_cast<double>(shares.size()) * steps);
  double sum = 0;
  for (const auto& [count, us] : recent_) sum += us;
  while (recent_.size() > 1 && sum - recent_.front().second >= kRecentUs) {
    sum -= recent_.front().second;
    recent_.pop_front();
  }

  if (compared_ < kFirst) {
    ++compared_;
    return;
  }
  if (stages_) {
    bool known = true;
    for (Share& share : shares) {
      Rank& rank = *share.rank;
      if (rank.usual.size() < kKnown) {
        rank.usual.push_back(share.entry->busy_us);
        known = false;
      } else {
        share.value /= std::max(1.0, middle(rank.usual));
      }
    }
    if (!known) return;
  }
  std::vector<double> sorted;
  for (const Share& share : shares) sorted.push_back(share.value);
  std::sort(sorted.begin(), sorted.end());
  for (const Share& share : shares) {
    const auto place = static_cast<std::size_t>(std::lower_bound(sorted.begin(), sorted.end(), share.value) -
                                                sorted.begin());
    look(share, middle_of_others(sorted, place), lines);
  }
}

void StragglerDetector::look(const Share& share, double others, std::vector<std::string>& lines) {
  Rank& rank = *share.rank;
  const Entry& entry = *share.entry;
  const bool known = rank.usual.size() >= kKnown;
  const double usual = known ? middle(rank.usual) : 0;
  // The time the rank would take if it were like its peers.
  const double other = stages_ ? usual * others : others;
  const double more = entry.busy_us - other;
  const double ratio = entry.busy_us / std::max(1.0, other);
  const double least = crowded_ ? kLeastCrowdedUs : kLeastUs;
  const bool is_long = ratio > kFactor && more >= least && more * entry.steps >= kLeastTogetherUs &&
                       (!known || entry.busy_us > kOwnFactor * usual);
  if (!is_long) {
    if (!rank.named) {
      if (rank.slow > 0)
        for (Noise* noise : {&rank.noise, &noise_}) noise->long_steps += rank.slow, ++noise->rows;
      rank.usual.push_back(entry.busy_us);
      if (rank.usual.size() > kUsual) rank.usual.pop_front();
    }
    rank.slow = 0;
  } else if (rank.slow++ == 0) {
    rank.first_slow = entry.key.second - static_cast<std::int64_t>(entry.steps) + 1;
    rank.slow_busy = rank.slow_other = rank.slow_ratio = 0;
  }
  if (is_long) {
    rank.slow_busy += entry.busy_us;
    rank.slow_other += other;
    rank.slow_ratio += ratio;
  }
  if (!rank.named) ++rank.noise.steps, ++noise_.steps;

  if (!rank.named && rank.slow >= needed(rank)) {
    rank.named = true;
    rank.fine = 0;
    ++rank.times_named;
    lines.push_back(
        fmt::format("rank {} is slow: its steps take {} as {} (busy {}, {} {}, steps {} to {})", share.number,
                    times(rank.slow_ratio / rank.slow), stages_ ? "before" : "the other ranks'",
                    in_milliseconds(rank.slow_busy / rank.slow), stages_ ? "before" : "others",
                    in_milliseconds(rank.slow_other / rank.slow), rank.first_slow, entry.key.second));
    return;
  }
  if (!rank.named) return;
  rank.fine = ratio < kFineFactor || more < least ? rank.fine + 1 : 0;
  if (rank.fine < kFineSteps) return;
  rank.named = false;
  rank.slow = 0;
  lines.push_back(fmt::format("rank {} is no longer slow: its steps take {} as {} (busy {}, step {})",
                              share.number, times(ratio), stages_ ? "before" : "the other ranks'",
                              in_milliseconds(entry.busy_us), entry.key.second));
}

// The number of long steps in a row that chance does not explain, given how often such a run begins and how
// often it continues (noise comes in bursts): on this rank or on all, whichever is more. A rank that was
// named before needs more.
int StragglerDetector::needed(const Rank& rank) const {
  double begins = 0, goes_on = 0;
  for (const Noise& noise : {rank.noise, noise_}) {
    begins = std::max(begins, (noise.rows + 0.5) / (noise.steps + 100));
    goes_on = std::max(goes_on, (noise.long_steps - noise.rows + 0.2) / (noise.long_steps + 30));
  }
  const double more = std::log(std::min(1.0, kChance / begins)) / std::log(std::min(goes_on, 0.9));
  return std::max(kInARow, 1 + static_cast<int>(std::ceil(more))) << std::min(rank.times_named, 10);
}

double StragglerDetector::middle(const std::deque<double>& values) {
  std::vector<double> sorted(values.begin(), values.end());
  const auto at = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), at, sorted.end());
  return *at;
}

std::optional<Status> StragglerDetector::status() const {
  if (recent_.empty()) return std::nullopt;
  Status status;
  double steps = 0, us = 0;
  for (const auto& [count, took] : recent_) steps += count, us += took;
  if (us > 0) status.steps_per_second = steps * 1e6 / us;
  status.waiting = waiting_;
  std::vector<double> busy;
  for (const auto& [number, rank] : ranks_) {
    if (rank.busy < 0) continue;
    busy.push_back(rank.busy);
    if (status.slowest < 0 || rank.busy > ranks_.at(status.slowest).busy) status.slowest = number;
  }
  if (busy.size() < 2) return status;
  std::sort(busy.begin(), busy.end());
  status.slowness = busy.back() / std::max(1.0, middle_of_others(busy, busy.size() - 1));
  return status;
}

}  // namespace lockstep::control

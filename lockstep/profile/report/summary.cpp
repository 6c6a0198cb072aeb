#include <lockstep/profile/report/summary.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <numeric>
#include <set>
#include <tuple>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/profile/record/intervals.h>
#include <lockstep/profile/report/arrivals.h>

namespace lockstep::profile {

Parts& Parts::operator+=(const Parts& more) {
  compute += more.compute, communication += more.communication, data += more.data;
  optimizer += more.optimizer, code += more.code, idle += more.idle, other += more.other;
  return *this;
}

Parts Parts::operator/(double count) const {
  return {compute / count, communication / count, data / count, optimizer / count,
          code / count,    idle / count,          other / count};
}

double Parts::sum() const { return compute + communication + data + optimizer + code + idle + other; }

namespace {

double median(std::vector<double> values, double share = 0.5) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const auto place = share * static_cast<double>(values.size() - 1);
  const auto low = static_cast<std::size_t>(place);
  const auto high = std::min(low + 1, values.size() - 1);
  return values[low] + (values[high] - values[low]) * (place - static_cast<double>(low));
}

// A stretch of the main thread's time of one kind.
struct Piece {
  std::int64_t begin, end;
  double Parts::*part;
};

// Walks the nested spans of the main thread. Operators inside an optimizer step count as optimizer; waiting
// always counts as waiting.
class Walk {
 public:
  explicit Walk(const RankProfile& profile) : profile_(profile) {}

  std::vector<Piece> run() {
    std::vector<const Event*> events;
    for (const auto& event : profile_.events)
      if (event.thread == profile_.main_thread) events.push_back(&event);
    std::stable_sort(events.begin(), events.end(), [](const Event* a, const Event* b) {
      return a->begin != b->begin ? a->begin < b->begin : a->depth < b->depth;
    });
    for (const Event* event : events) {
      while (!open_.empty() && open_.back()->end <= event->begin) close();
      reach(event->begin);
      if (event->cpu_begin >= 0) gap_ends(event->begin, event->cpu_begin);
      open_.push_back(event);
      if (event->begin == event->end) close();  // a step border
    }
    while (!open_.empty()) close();
    return std::move(pieces_);
  }

 private:
  void close() {
    const Event* event = open_.back();
    reach(event->end);
    open_.pop_back();
    if (event->cpu_end >= 0) {
      gap_begin_ = event->end;
      gap_operators_ = 0;
      gap_cpu_ = event->cpu_end;
    }
  }

  double Parts::*kind() const {
    double Parts::*found = nullptr;
    for (const Event* event : open_) {
      if (event->kind == SpanKind::wait) return &Parts::communication;
      if (event->kind == SpanKind::data) found = &Parts::data;
      if (event->kind == SpanKind::optimizer && found != &Parts::data) found = &Parts::optimizer;
      if (event->kind == SpanKind::operation && !found) found = &Parts::compute;
    }
    return found;
  }

  void reach(std::int64_t time) {
    if (time <= now_) return;
    if (double Parts::*part = kind()) {
      pieces_.push_back({now_, time, part});
      if (gap_cpu_ >= 0) gap_operators_ += time - std::max(now_, gap_begin_);
    }
    now_ = time;
  }

  // Between operators a thread runs the program's code or sleeps; its CPU time tells which. Kineto's
  // operators have no CPU time and lie within the gap: they count as computing for their whole duration.
  void gap_ends(std::int64_t end, std::int64_t cpu) {
    if (gap_cpu_ < 0 || end <= gap_begin_) return;
    const auto begin = std::min(gap_begin_ + gap_operators_, end);
    const auto busy = std::clamp<std::int64_t>(cpu - gap_cpu_ - gap_operators_, 0, end - begin);
    pieces_.push_back({begin, begin + busy, &Parts::code});
    pieces_.push_back({begin + busy, end, &Parts::idle});
    gap_cpu_ = -1;
  }

  const RankProfile& profile_;
  std::vector<const Event*> open_;
  std::vector<Piece> pieces_;
  std::int64_t now_ = std::numeric_limits<std::int64_t>::min();
  std::int64_t gap_begin_ = 0, gap_cpu_ = -1, gap_operators_ = 0;
};

using Kinds = std::map<std::tuple<Operation, std::string, std::string, std::int64_t>, CollectiveSummary>;

// Summarises one rank's steps, and adds its share to the collectives.
class RankSteps {
 public:
  RankSteps(const RankProfile& profile, const ArrivalsByCollective& met, std::int64_t zero)
      : profile_(profile), met_(met), zero_(zero), pieces_(Walk(profile).run()) {
    Intervals waits;
    for (const auto& piece : pieces_)
      if (piece.part == &Parts::communication) waits.push_back({piece.begin, piece.end});
    waits_ = united(std::move(waits));
    Intervals under_way, for_others;
    for (const auto& transfer : profile.transfers) {
      under_way.push_back({transfer.begin, transfer.end});
      if (detail::point_to_point(transfer.operation)) continue;
      const auto last =
          met.at({group_of(profile, transfer).key, transfer.sequence}).last().begin - profile.origin;
      for_others.push_back({transfer.begin, std::min(transfer.end, last)});
    }
    under_way_ = united(std::move(under_way));
    for_others_ = united(std::move(for_others));
    Intervals elsewhere;
    for (const auto& event : profile.events)
      if (event.thread != profile.main_thread &&
          profile.names[static_cast<std::size_t>(event.name)].starts_with(
              "autograd::engine::evaluate_function"))
        elsewhere.push_back({event.begin, event.end});
    backward_elsewhere_ = united(std::move(elsewhere));
  }

  StepSummary of(const StepOf& step) const {
    StepSummary summary;
    summary.step = step.step;
    summary.rank = profile_.rank;
    summary.begin_ms = milliseconds(profile_.origin + step.begin - zero_);
    summary.ms = milliseconds(step.end - step.begin);
    for (const auto& piece : pieces_) {
      const auto begin = std::max(piece.begin, step.begin), end = std::min(piece.end, step.end);
      if (end <= begin) continue;
      // For a model on a device, autograd runs backward on its own thread while the calling thread sleeps.
      const auto computed = piece.part == &Parts::idle ? covered(backward_elsewhere_, begin, end) : 0;
      summary.parts.compute += milliseconds(computed);
      summary.parts.*piece.part += milliseconds(end - begin - computed);
    }
    summary.parts.other = std::max(0.0, summary.ms - summary.parts.sum());
    summary.transfer_ms = milliseconds(covered(under_way_, step.begin, step.end));
    summary.waiting_ms = milliseconds(covered(for_others_, clipped(waits_, step.begin, step.end)));
    for (const auto& transfer : profile_.transfers)
      if (transfer.begin >= step.begin && transfer.begin < step.end &&
          !detail::point_to_point(transfer.operation)) {
        const auto& arrivals = met_.at({group_of(profile_, transfer).key, transfer.sequence});
        summary.late_ms =
            std::max(summary.late_ms, milliseconds(profile_.origin + transfer.begin - arrivals.middle()));
      }
    for (const auto& event : profile_.events)
      if (event.begin >= step.begin && event.begin < step.end)
        summary.flops += static_cast<double>(event.flops);
    return summary;
  }

  void add_to(Kinds& kinds) const {
    if (profile_.steps.empty()) return;
    for (const auto& transfer : profile_.transfers) {
      const auto& group = group_of(profile_, transfer);
      const auto& tag = profile_.names[static_cast<std::size_t>(transfer.tag)];
      auto& kind = kinds[{transfer.operation, group.name, tag, transfer.bytes}];
      kind.operation = transfer.operation;
      kind.group = group.name;
      kind.tag = tag;
      kind.bytes = transfer.bytes;
    }
    // A wait names its operation; other operations may be in flight that nothing waits for.
    for (const auto& event : profile_.events)
      if (event.kind == SpanKind::wait && event.transfer >= 0 && event.thread == profile_.main_thread) {
        const auto& transfer = profile_.transfers[static_cast<std::size_t>(event.transfer)];
        kinds[{transfer.operation, group_of(profile_, transfer).name,
               profile_.names[static_cast<std::size_t>(transfer.tag)], transfer.bytes}]
            .exposed_ms += milliseconds(event.end - event.begin);
      }
  }

 private:
  const RankProfile& profile_;
  const ArrivalsByCollective& met_;
  const std::int64_t zero_;
  const std::vector<Piece> pieces_;
  Intervals waits_, under_way_, for_others_, backward_elsewhere_;
};

double number_in(const RankProfile& profile, const char* what) {
  const auto found = profile.notes.find(what);
  if (found == profile.notes.end()) return 0;
  double value = 0;
  const auto& text = found->second;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

std::set<std::int64_t> numbers_of(const RankProfile& profile) {
  std::set<std::int64_t> numbers;
  for (const auto& step : profile.steps) numbers.insert(step.step);
  return numbers;
}

// Steps that every rank has recorded.
std::set<std::int64_t> common_steps(const std::vector<RankProfile>& profiles) {
  std::map<std::int64_t, std::size_t> count;
  for (const auto& profile : profiles)
    for (const auto& step : numbers_of(profile)) ++count[step];
  std::set<std::int64_t> common;
  for (const auto& [step, times] : count)
    if (times == profiles.size()) common.insert(step);
  if (common.empty())
    throw ConfigError(
        fmt::format("the profiles of {} ranks have no step in common; profile the same steps on every rank",
                    profiles.size()));
  return common;
}

RankSummary rank_summary(const RankProfile& profile, const std::vector<StepSummary>& steps) {
  RankSummary summary;
  summary.rank = profile.rank;
  summary.host = profile.host;
  std::vector<double> times;
  for (const auto& step : steps) {
    times.push_back(step.ms);
    summary.parts += step.parts;
    summary.transfer_ms += step.transfer_ms;
    summary.waiting_ms += step.waiting_ms;
  }
  const auto count = static_cast<double>(steps.size());
  summary.parts = summary.parts / count;
  summary.transfer_ms /= count;
  summary.waiting_ms /= count;
  summary.step_median = median(times);
  summary.step_p90 = median(times, 0.9);
  summary.step_mean = std::accumulate(times.begin(), times.end(), 0.0) / count;
  constexpr std::string_view kMemory = "memory.";
  std::int64_t known = 0, peak = 0;
  for (const auto& [what, value] : profile.notes)
    if (what.starts_with(kMemory)) {
      const auto bytes = static_cast<std::int64_t>(number_in(profile, what.c_str()));
      summary.memory[what.substr(kMemory.size())] = bytes;
      known += bytes;
    }
  for (const auto& sample : profile.memory) peak = std::max(peak, sample.bytes);
  if (peak > 0) {
    summary.memory["total"] = peak;
    summary.memory["activations"] = std::max<std::int64_t>(0, peak - known);
  }
  return summary;
}

// Finds the rank that computed longest, if by more than chance: at least 2 percent more than the median.
void find_slowest(Summary& summary) {
  std::map<std::int64_t, std::vector<const StepSummary*>> by_step;
  for (const auto& step : summary.steps) by_step[step.step].push_back(&step);
  for (const auto& [number, ranks] : by_step) {
    std::vector<double> busy;
    for (const auto* rank : ranks) busy.push_back(rank->ms - rank->waiting_ms);
    const auto most = std::max_element(busy.begin(), busy.end());
    auto others = busy;
    others.erase(others.begin() + (most - busy.begin()));
    if (others.empty() || *most < 1.02 * median(others)) continue;
    const int rank = ranks[static_cast<std::size_t>(most - busy.begin())]->rank;
    for (auto& each : summary.each) each.slowest_times += each.rank == rank;
  }
  for (const auto& each : summary.each)
    if (each.slowest_times > summary.slowest_times) {
      summary.slowest_rank = each.rank;
      summary.slowest_times = each.slowest_times;
    }
}

// For collectives that more than one rank has recorded.
void add_arrivals(Kinds& kinds, const std::vector<RankProfile>& profiles, const ArrivalsByCollective& met) {
  for (const auto& profile : profiles) {
    std::map<CollectiveSummary*, ArrivalSummary> mine;
    std::map<CollectiveSummary*, double> count;
    for (const auto& transfer : profile.transfers) {
      if (detail::point_to_point(transfer.operation)) continue;
      const auto& group = group_of(profile, transfer);
      const auto& arrivals = met.at({group.key, transfer.sequence});
      if (arrivals.ranks.size() < 2) continue;
      const auto& tag = profile.names[static_cast<std::size_t>(transfer.tag)];
      auto* kind = &kinds.at({transfer.operation, group.name, tag, transfer.bytes});
      const auto after = milliseconds(profile.origin + transfer.begin - arrivals.first().begin);
      auto& arrival = mine[kind];
      arrival.rank = profile.rank;
      arrival.mean_ms += after;
      arrival.most_ms = std::max(arrival.most_ms, after);
      arrival.last_times += arrivals.last().rank == profile.rank;
      ++count[kind];
    }
    for (auto& [kind, arrival] : mine) {
      arrival.mean_ms /= count[kind];
      kind->arrivals.push_back(arrival);
    }
  }
}

void sum_up_collectives(Summary& summary, const std::vector<RankProfile>& profiles,
                        const ArrivalsByCollective& met, Kinds kinds) {
  std::map<std::tuple<Operation, std::string, std::string, std::int64_t>, std::vector<double>> times;
  std::set<std::pair<CollectiveKey, Operation>> seen;
  for (const auto& profile : profiles)
    for (const auto& transfer : profile.transfers) {
      const auto& group = group_of(profile, transfer);
      const auto& tag = profile.names[static_cast<std::size_t>(transfer.tag)];
      auto& list = times[{transfer.operation, group.name, tag, transfer.bytes}];
      if (detail::point_to_point(transfer.operation)) {
        list.push_back(milliseconds(transfer.end - transfer.begin));
        continue;
      }
      const CollectiveKey meeting{group.key, transfer.sequence};
      if (transfer.unfinished || !seen.insert({meeting, transfer.operation}).second) continue;
      const auto& arrivals = met.at(meeting);
      list.push_back(milliseconds(arrivals.last_end - arrivals.last().begin));
    }
  add_arrivals(kinds, profiles, met);
  const auto share = static_cast<double>(profiles.size()) * summary.num_steps;
  for (auto& [which, kind] : kinds) {
    const auto& list = times[which];
    kind.count = list.size();
    kind.ms_median = median(list);
    kind.gb_per_s = kind.ms_median > 0 ? static_cast<double>(kind.bytes) / kind.ms_median / 1e6 : 0;
    kind.exposed_ms /= share;
    summary.collectives.push_back(kind);
  }
  std::sort(summary.collectives.begin(), summary.collectives.end(),
            [](const auto& a, const auto& b) { return a.exposed_ms > b.exposed_ms; });
}

void sum_up_ranks(Summary& summary) {
  auto& all = summary.overall;
  const auto count = static_cast<double>(summary.each.size());
  double exposed = 0;
  for (const auto& rank : summary.each) {
    all.parts += rank.parts;
    all.transfer_ms += rank.transfer_ms / count;
    all.waiting_ms += rank.waiting_ms / count;
    exposed += std::min(rank.parts.communication, rank.transfer_ms) / count;
  }
  all.parts = all.parts / count;
  std::map<std::int64_t, double> longest;
  for (const auto& step : summary.steps) longest[step.step] = std::max(longest[step.step], step.ms);
  std::vector<double> times;
  for (const auto& [step, ms] : longest) times.push_back(ms);
  all.step_median = median(times);
  all.step_p90 = median(times, 0.9);
  all.step_mean = all.parts.sum();
  if (all.transfer_ms > 0) summary.overlap_percent = 100 * (1 - exposed / all.transfer_ms);
}

}  // namespace

Summary summarize(const std::vector<RankProfile>& profiles) {
  Summary summary;
  const auto steps = common_steps(profiles);
  summary.program = profiles.front().program;
  if (const auto found = profiles.front().notes.find("backend"); found != profiles.front().notes.end())
    summary.backend = found->second;
  summary.ranks = static_cast<int>(profiles.size());
  for (int rank = 0; rank < profiles.front().size; ++rank)
    if (std::none_of(profiles.begin(), profiles.end(), [&](const auto& each) { return each.rank == rank; }))
      summary.missing.push_back(rank);
  summary.first_step = *steps.begin();
  summary.last_step = *steps.rbegin();
  summary.num_steps = static_cast<int>(steps.size());
  auto zero = profiles.front().origin;
  for (const auto& profile : profiles) {
    zero = std::min(zero, profile.origin);
    if (std::find(summary.hosts.begin(), summary.hosts.end(), profile.host) == summary.hosts.end())
      summary.hosts.push_back(profile.host);
  }
  const auto met = arrivals_of(profiles);
  Kinds kinds;
  double samples = 0, tokens = 0, peak_flops = 0, flops = 0;
  for (const auto& profile : profiles) {
    const RankSteps rank(profile, met, zero);
    std::vector<StepSummary> mine;
    for (const auto& step : profile.steps)
      if (steps.contains(step.step)) mine.push_back(rank.of(step));
    rank.add_to(kinds);
    summary.each.push_back(rank_summary(profile, mine));
    std::vector<StepOf> common;
    for (const auto& step : profile.steps)
      if (steps.contains(step.step)) common.push_back(step);
    summary.each.back().device = device_summary(profile, common);
    summary.steps.insert(summary.steps.end(), mine.begin(), mine.end());
    samples += number_in(profile, "samples_per_step");
    tokens += number_in(profile, "tokens_per_step");
    peak_flops += number_in(profile, "peak_flops");
    for (const auto& step : mine) flops += step.flops / static_cast<double>(mine.size());
  }
  std::stable_sort(summary.steps.begin(), summary.steps.end(),
                   [](const auto& a, const auto& b) { return a.step < b.step; });
  sum_up_ranks(summary);
  sum_up_devices(summary);
  find_slowest(summary);
  sum_up_collectives(summary, profiles, met, std::move(kinds));
  const double seconds = summary.overall.step_mean / 1e3;
  if (seconds > 0) {
    summary.samples_per_s = samples / seconds;
    summary.tokens_per_s = tokens / seconds;
    summary.flops_per_step = flops;
    if (peak_flops > 0) summary.mfu_percent = 100 * flops / seconds / peak_flops;
  }
  summary.hints = hints_for(summary);
  return summary;
}

}  // namespace lockstep::profile

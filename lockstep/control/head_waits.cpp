// Who waits for whom: who has left is a failure, who is merely slow is a line to the person. And whose steps
// are longer than the others'.
#include <algorithm>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/control/head.h>

namespace lockstep::control {

using std::chrono::milliseconds;

namespace {

// A collective that a rank which has left never came to: what it did before it left is known by then.
constexpr std::int64_t kLeftMs = 300;
constexpr std::chrono::seconds kForget(30);
constexpr std::int64_t kFirstTell = 1000, kLastTell = std::int64_t{1} << 40;

std::string seconds(std::int64_t ms) { return fmt::format("{:.1f} s", static_cast<double>(ms) / 1000); }

std::string call_text(const Row& row, std::int64_t sequence) {
  auto text = fmt::format("{} #{}", row.operation, sequence);
  if (row.message && row.peer >= 0) text += fmt::format(" with rank {}", row.peer);
  text += fmt::format(" of group '{}'", row.group);
  if (!row.site.empty()) text += " at " + row.site;
  return text;
}

}  // namespace

// The operation that it is in, else the last one.
std::string Head::where(int number) const {
  auto rank = ranks_.find(number);
  if (rank == ranks_.end()) return {};
  const Row* last = nullptr;
  for (const Row& row : rank->second.rows.rows)
    if (row.sequence >= 0 && (!last || row.running > last->running ||
                              (row.running == last->running && row.since_ms < last->since_ms)))
      last = &row;
  if (!last) return {};
  return (last->running ? "in " : "after ") + call_text(*last, last->sequence);
}

std::vector<Head::Wait> Head::waits(Clock::time_point now) const {
  std::vector<Wait> waits;
  std::set<int> waiting;
  for (const auto& [number, rank] : ranks_) {
    if (!rank.here) continue;
    const auto age = std::chrono::duration_cast<milliseconds>(now - rank.rows_at).count();
    for (const Row& row : rank.rows.rows) {
      if (row.waits_for < 0) continue;
      waiting.insert(number);
      Wait wait{.rank = number, .row = &row, .missing = {}, .waited_ms = row.waited_ms + age};
      auto group = groups_.find(row.key);
      if (group == groups_.end()) continue;
      const auto& members = group->second.ranks;
      if (row.message) {
        if (row.peer >= 0 && row.peer < static_cast<int>(members.size()))
          wait.missing = {members[static_cast<std::size_t>(row.peer)]};
      } else {
        for (int member : members) {
          auto other = ranks_.find(member);
          if (other == ranks_.end()) continue;
          auto reached = other->second.reached.find(row.key);
          if (reached == other->second.reached.end() || reached->second < row.waits_for)
            wait.missing.push_back(member);
        }
      }
      if (!wait.missing.empty()) waits.push_back(std::move(wait));
    }
  }
  for (Wait& wait : waits)
    wait.root =
        std::any_of(wait.missing.begin(), wait.missing.end(), [&](int r) { return !waiting.contains(r); });
  return waits;
}

void Head::look_at_waits(Clock::time_point now) {
  if (paused_) {
    quiet_until_ = now + milliseconds(kFirstTell);
    return;
  }
  const Wait* longest = nullptr;
  const auto all = waits(now);
  for (const Wait& wait : all) {
    for (int number : wait.missing) {
      auto found = ranks_.find(number);
      if (found == ranks_.end() || found->second.here || !found->second.card || wait.row->message ||
          wait.waited_ms < kLeftMs)
        continue;
      const Rank& rank = found->second;
      auto failure = failure_of(number, fmt::format("{} while rank {} waits for it in {}",
                                                    rank.ended ? rank.ended->text() : "has left the job",
                                                    wait.rank, call_text(*wait.row, wait.row->waits_for)));
      return fail(std::move(failure));
    }
    if (!longest || wait.root > longest->root ||
        (wait.root == longest->root && wait.waited_ms > longest->waited_ms))
      longest = &wait;
  }
  if (!longest) {
    told_.clear();
    return;
  }
  if (now < quiet_until_) return;
  std::erase_if(told_, [&](const auto& told) {  // of waits that are over
    return std::none_of(all.begin(), all.end(), [&](const Wait& wait) {
      return told.first == std::pair(wait.row->key, wait.row->waits_for);
    });
  });
  auto& next = told_.try_emplace({longest->row->key, longest->row->waits_for}, kFirstTell).first->second;
  if (longest->waited_ms < next) return;
  while (next <= longest->waited_ms && next < kLastTell) next *= 2;
  std::vector<std::string> absent;
  for (int number : longest->missing) {
    auto place = where(number);
    auto found = ranks_.find(number);
    std::int64_t since = -1;
    if (found != ranks_.end())
      for (const Row& row : found->second.rows.rows)
        if (row.sequence >= 0 && (since < 0 || row.since_ms < since)) since = row.since_ms;
    absent.push_back(fmt::format("rank {}{}, {}{}{}", number, pid_text(number),
                                 place.empty() ? "which has begun no operation" : "last " + place,
                                 since >= 0 ? fmt::format(", {} ago", seconds(since)) : "",
                                 found != ranks_.end() && found->second.rows.step >= 0
                                     ? fmt::format(", step {}", found->second.rows.step)
                                     : ""));
    if (absent.size() == 4 && longest->missing.size() > 5) {
      absent.push_back(fmt::format("and {} more", longest->missing.size() - absent.size()));
      break;
    }
  }
  ports_.say(fmt::format("rank {} has waited {} in {}; not there: {}", longest->rank,
                         seconds(longest->waited_ms), call_text(*longest->row, longest->row->waits_for),
                         fmt::join(absent, "; ")));
}

void Head::note_steps(int number, Rank& rank) {
  if (!rank.here) return pace_.forget(number);
  for (const StepTime& time : rank.rows.times) pace_.note(number, time);
  if (std::any_of(rank.rows.rows.begin(), rank.rows.rows.end(), [](const Row& row) { return row.message; }))
    pace_.has_stages();
}

void Head::look_at_pace() {
  const auto beside = std::count_if(ranks_.begin(), ranks_.end(), [](const auto& each) {
    return each.second.here && each.second.node == 0;
  });
  pace_.set_crowded(options_.cores > 0 && beside > options_.cores);
  for (const auto& line : pace_.judge())
    if (!paused_) ports_.say(line);
  const auto first = ranks_.find(0);
  if (!ports_.status || first == ranks_.end() || !first->second.here || first->second.rows.step < 0) return;
  Status status = pace_.status().value_or(Status{});
  status.step = first->second.rows.step;
  status.metrics = first->second.rows.metrics;
  ports_.status(status);
}

// Pages have room for few groups that are gone; of one that is on none nobody can wait. Another may be so new
// that nobody's page has told.
void Head::forget_groups(Clock::time_point now) {
  forgets_at_ = now + kForget;
  for (const auto& [number, rank] : ranks_)
    for (const Row& row : rank.rows.rows)
      if (auto seen = group_seen_.find(row.key); seen != group_seen_.end()) seen->second = now;
  std::erase_if(group_seen_, [&](const auto& each) {
    if (now - each.second < 2 * kForget) return false;
    groups_.erase(each.first);
    for (auto& [number, rank] : ranks_) rank.reached.erase(each.first);
    return true;
  });
}

std::string Head::pid_text(int number) const {
  auto rank = ranks_.find(number);
  if (rank == ranks_.end() || !rank->second.card) return {};
  return fmt::format(" (pid {})", rank->second.card->pid);
}

}  // namespace lockstep::control

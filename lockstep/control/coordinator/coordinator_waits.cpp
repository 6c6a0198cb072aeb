// Which rank waits for which: a wait for a rank that has left is a failure; a slow rank is reported in a
// line. Also finds deadlocks, and ranks whose steps are longer than their peers'.
#include <algorithm>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/control/board/board.h>
#include <lockstep/control/coordinator/coordinator.h>

namespace lockstep::control {

using std::chrono::milliseconds;

namespace {

// Minimum wait for a rank that left before reaching the collective: by then its earlier operations are known.
constexpr std::int64_t kLeftMs = 300;
constexpr std::chrono::seconds kForget(30);
// How long a deadlock must persist unchanged, and how often each of its ranks must be seen in it.
constexpr std::chrono::seconds kDeadlock(1);
constexpr std::int64_t kDeadlockLooks = 3;
constexpr std::size_t kMostSides = 4;  // Number of sides of a deadlock that are shown.
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

// The operation that the rank is in, else its last one.
std::string Coordinator::where(int number) const {
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

std::vector<Coordinator::Wait> Coordinator::waits(Clock::time_point now) const {
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

void Coordinator::look_at_waits(const std::vector<Wait>& all, Clock::time_point now) {
  if (paused_) {
    quiet_until_ = now + milliseconds(kFirstTell);
    return;
  }
  const Wait* longest = nullptr;
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
  std::erase_if(told_, [&](const auto& told) {  // Waits that have ended.
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
                                 place.empty() ? "no operation begun" : "last " + place,
                                 since >= 0 ? fmt::format(", {} ago", seconds(since)) : "",
                                 found != ranks_.end() && found->second.rows.step >= 0
                                     ? fmt::format(", step {}", found->second.rows.step)
                                     : ""));
    if (absent.size() == 4 && longest->missing.size() > 5) {
      absent.push_back(fmt::format("and {} more", longest->missing.size() - absent.size()));
      break;
    }
  }
  ports_.say(fmt::format("rank {} has waited {} in {}; missing: {}", longest->rank,
                         seconds(longest->waited_ms), call_text(*longest->row, longest->row->waits_for),
                         fmt::join(absent, "; ")));
}

// Returns the largest set of ranks that cannot continue: every thread that issues operations is blocked in a
// collective that another rank of the set has not reached, and that rank can issue nothing. An operation that
// a rank has issued without waiting for it counts as reached. Whether a message has arrived is not known, so
// a rank that waits for a message is not in the set.
Coordinator::Stuck Coordinator::deadlocked(const std::vector<Wait>& all) const {
  Stuck stuck;
  for (const Wait& wait : all)
    if (!wait.row->message) stuck[wait.rank].push_back(&wait);
  std::erase_if(stuck, [&](const auto& each) {
    const Rows& rows = ranks_.at(each.first).rows;
    const auto waiting =
        std::count_if(rows.rows.begin(), rows.rows.end(), [](const Row& row) { return row.waits_for >= 0; });
    // Each thread has its own line, and each line waits for a peer.
    return rows.threads == 0 || rows.blocked != rows.threads || waiting != rows.blocked ||
           waiting != static_cast<std::ptrdiff_t>(each.second.size());
  });
  auto can_end = [&](const Wait* wait) {
    return std::none_of(wait->missing.begin(), wait->missing.end(),
                        [&](int r) { return stuck.contains(r) && tells_of(r, wait->row->key); });
  };
  while (std::erase_if(stuck, [&](const auto& each) {
    return std::any_of(each.second.begin(), each.second.end(), can_end);
  })) {
  }
  return stuck;
}

// True if the rank's page has room for the group, so that what the rank has begun there is known.
bool Coordinator::tells_of(int number, std::int64_t key) const {
  const auto& rows = ranks_.at(number).rows.rows;
  return rows.size() < Board::kLines || std::any_of(rows.begin(), rows.end(), [&](const Row& row) {
           return row.key == key && !row.message;
         });
}

// Finds a group in which every rank waits in a collective, but in different ones. Engines that do not compare
// calls would wait there until the deadline.
Coordinator::Differing Coordinator::differing() const {
  for (const auto& [key, group] : groups_) {
    Differing calls;
    for (const int member : group.ranks) {
      const auto rank = ranks_.find(member);
      if (rank == ranks_.end() || !rank->second.here) break;
      const Row* call = nullptr;
      for (const Row& row : rank->second.rows.rows)
        if (row.key == key && !row.message && row.waits_for >= 0) call = &row;
      // The row describes the last operation that the rank has begun.
      if (!call || call->waits_for != call->sequence) break;
      if (!calls.empty() && calls[0].second->sequence != call->sequence) break;
      calls.emplace_back(member, call);
    }
    if (calls.size() != group.ranks.size()) continue;
    if (std::any_of(calls.begin(), calls.end(),
                    [&](const auto& each) { return each.second->operation != calls[0].second->operation; }))
      return calls;
  }
  return {};
}

void Coordinator::look_at_deadlock(const std::vector<Wait>& all, Clock::time_point now) {
  const bool looks = !paused_ && now >= quiet_until_;
  const auto stuck = looks ? deadlocked(all) : Stuck{};
  const auto calls = looks && stuck.empty() ? differing() : Differing{};
  std::vector<StuckWait> seen;
  for (const auto& [number, waits] : stuck)
    for (const Wait* wait : waits)
      seen.push_back({number, wait->row->key, wait->row->waits_for, ranks_.at(number).looks});
  for (const auto& [number, row] : calls)
    seen.push_back({number, row->key, row->waits_for, ranks_.at(number).looks});
  const bool same = std::equal(seen.begin(), seen.end(), deadlock_.begin(), deadlock_.end(),
                               [](const auto& one, const auto& other) { return one.same_as(other); });
  if (!same) {
    deadlock_ = std::move(seen);
    deadlock_since_ = now;
  }
  if (deadlock_.empty() || now - deadlock_since_ < kDeadlock) return;
  // A silent host looks as if nothing changed there.
  for (const StuckWait& each : deadlock_)
    if (ranks_.at(each.rank).looks < each.looks + kDeadlockLooks) return;
  fail(stuck.empty() ? failure_of(calls) : failure_of(stuck));
}

Failure Coordinator::failure_of(const Differing& calls) const {
  const auto& [rank, row] = calls.front();
  const auto other = std::find_if(calls.begin(), calls.end(), [&](const auto& each) {
    return each.second->operation != calls.front().second->operation;
  });
  Failure failure;
  failure.kind = CommError::Kind::mismatch;
  failure.cause = fmt::format(
      "the ranks' calls differ in operation: rank {}{} waits in {}, rank {}{} in {}. Every rank must call "
      "the operations of a group in the same order",
      rank, pid_text(rank), call_text(*row, row->waits_for), other->first, pid_text(other->first),
      call_text(*other->second, other->second->waits_for));
  return failure;
}

// Describes one cycle, starting at its lowest rank.
Failure Coordinator::failure_of(const Stuck& stuck) const {
  std::vector<std::pair<const Wait*, int>> path;  // Each with the rank that it waits for.
  for (int number = stuck.begin()->first;;) {
    const auto begin =
        std::find_if(path.begin(), path.end(), [&](const auto& each) { return each.first->rank == number; });
    if (begin != path.end()) {
      path.erase(path.begin(), begin);
      break;
    }
    const Wait* wait = stuck.at(number).front();
    number = *std::find_if(wait->missing.begin(), wait->missing.end(),
                           [&](int r) { return stuck.contains(r) && tells_of(r, wait->row->key); });
    path.emplace_back(wait, number);
  }
  std::rotate(path.begin(),
              std::min_element(
                  path.begin(), path.end(),
                  [](const auto& one, const auto& other) { return one.first->rank < other.first->rank; }),
              path.end());
  std::vector<std::string> sides;
  for (const auto& [wait, other] : path) {
    if (sides.size() == kMostSides && path.size() > kMostSides + 1) {
      sides.push_back(fmt::format("and so on, {} ranks in all", path.size()));
      break;
    }
    sides.push_back(fmt::format("rank {}{} waits for rank {} in {}", wait->rank, pid_text(wait->rank), other,
                                call_text(*wait->row, wait->row->waits_for)));
  }
  Failure failure;
  failure.kind = CommError::Kind::mismatch;
  failure.cause = fmt::format("deadlock: {}", fmt::join(sides, "; "));
  if (stuck.size() > path.size())
    failure.cause += fmt::format("; {} more blocked by these", stuck.size() - path.size());
  failure.cause += ". Every rank must call the operations of its groups in the same order";
  return failure;
}

void Coordinator::note_steps(int number, Rank& rank) {
  if (!rank.here) return stragglers_.forget(number);
  for (const StepTime& time : rank.rows.times) stragglers_.note(number, time);
  if (std::any_of(rank.rows.rows.begin(), rank.rows.rows.end(), [](const Row& row) { return row.message; }))
    stragglers_.has_stages();
}

void Coordinator::look_at_pace() {
  const auto beside = std::count_if(ranks_.begin(), ranks_.end(), [](const auto& each) {
    return each.second.here && each.second.node == 0;
  });
  stragglers_.set_crowded(options_.cores > 0 && beside > options_.cores);
  for (const auto& line : stragglers_.judge())
    if (!paused_) ports_.say(line);
  const auto first = ranks_.find(0);
  if (!ports_.status || first == ranks_.end() || !first->second.here || first->second.rows.step < 0) return;
  Status status = stragglers_.status().value_or(Status{});
  status.step = first->second.rows.step;
  status.metrics = first->second.rows.metrics;
  ports_.status(status);
}

// A page has room for only a few retired groups. No rank can wait in a group that is on no page, unless the
// group is so new that no page has shown it yet.
void Coordinator::forget_groups(Clock::time_point now) {
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

std::string Coordinator::pid_text(int number) const {
  auto rank = ranks_.find(number);
  if (rank == ranks_.end() || !rank->second.card) return {};
  return fmt::format(" (pid {})", rank->second.card->pid);
}

}  // namespace lockstep::control

#include <lockstep/base/text.h>
#include <lockstep/launch/flight/flight_verdict.h>

#include <algorithm>
#include <csignal>
#include <limits>
#include <optional>
#include <set>
#include <tuple>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace lockstep::detail {
namespace {

using control::FlightEntry;
using control::FlightRecord;
using control::RankFlight;
using Kind = FlightVerdict::Kind;

std::string listed(const std::vector<int>& ranks) {
  if (ranks.size() == 1) return fmt::format("rank {}", ranks[0]);
  // Of very many ranks only the first ones; the file lists all.
  const auto shown = ranks.size() > 9 ? std::size_t{8} : ranks.size() - 1;
  auto text =
      fmt::format("ranks {} and ", fmt::join(ranks.begin(), ranks.begin() + static_cast<long>(shown), ", "));
  return text +
         (ranks.size() > 9 ? fmt::format("{} more", ranks.size() - shown) : std::to_string(ranks.back()));
}

bool is_open(const FlightEntry& entry) { return entry.ended_ns == 0 || entry.failed; }

// The properties that all ranks' calls to one collective must share.
using Signature = std::tuple<std::string, std::string, std::string, int, std::int64_t>;

Signature signature(const FlightEntry& entry) {
  const bool one_count =
      entry.operation == "all_reduce" || entry.operation == "reduce" || entry.operation == "broadcast";
  return {entry.operation, entry.dtype, entry.reduction, entry.peer, one_count ? entry.count : -1};
}

// A problem found in one group.
struct Finding {
  FlightVerdict verdict;
  std::int64_t at_ns = 0;
  bool root = true;  // True if the blamed ranks did not wait for peers themselves.
  std::string brief = {};
};

// A rank that peers have waited for no longer than this may be innocent: it may only have been late.
constexpr std::int64_t kOftenWaitsNs = 1'000'000'000;

// One rank's collectives of a group, by sequence number.
struct Course {
  std::map<std::int64_t, const FlightEntry*> calls;
  bool whole = true;  // True if no entry was overwritten in the ring.
  std::int64_t last() const { return calls.empty() ? -1 : calls.rbegin()->first; }
};

class Judge {
 public:
  explicit Judge(const FlightRecord& record) : record_(record) {
    for (const auto& [rank, flight] : record.ranks)
      for (const auto& entry : flight.log.entries) {
        entries_[entry.key][rank].push_back(&entry);
        last_ns_ = std::max({last_ns_, entry.began_ns, entry.ended_ns});
        // The failed rank did not wait in an operation that was open when it ended, unless that operation
        // failed.
        const bool own_end = record.failure && record.failure->rank == rank;
        if (is_open(entry) && (entry.failed || !own_end)) waiting_.insert(rank);
      }
  }

  FlightVerdict verdict() {
    for (const auto& [key, ranks] : entries_) {
      look_at_collectives(key);
      look_at_messages(key);
    }
    const bool own_end = failed_by_its_own_end();
    if (own_end)
      std::erase_if(findings_, [&](const Finding& each) {
        return each.verdict.kind != Kind::differs && !names(each, record_.failure->rank) &&
               last_ns_ - each.at_ns < kOftenWaitsNs;
      });
    if (findings_.empty()) return agree();
    // A differing call is an error whatever the timing.
    const auto sooner = [](const Finding& a, const Finding& b) {
      const bool a_differs = a.verdict.kind == Kind::differs, b_differs = b.verdict.kind == Kind::differs;
      if (a_differs != b_differs) return a_differs;
      if (a.root != b.root) return a.root;
      return a.at_ns < b.at_ns;
    };
    std::sort(findings_.begin(), findings_.end(), sooner);
    auto verdict = findings_[0].verdict;
    if (!findings_[0].root) add_others_of_a_circle(verdict);
    if (own_end && !names(findings_[0], record_.failure->rank))
      verdict.text += "; the job's failure: " + record_.failure->text();
    return verdict;
  }

 private:
  // Ranks that wait for each other: which of them diverged cannot be determined.
  void add_others_of_a_circle(FlightVerdict& verdict) const {
    std::set<int> all(verdict.ranks.begin(), verdict.ranks.end());
    std::vector<std::string> others;
    for (const Finding& each : findings_) {
      if (each.verdict.kind == Kind::differs || each.verdict.ranks == verdict.ranks) continue;
      all.insert(each.verdict.ranks.begin(), each.verdict.ranks.end());
      if (others.size() < 3) others.push_back(each.brief);
    }
    if (others.empty()) return;
    verdict.ranks.assign(all.begin(), all.end());
    verdict.text += fmt::format("; these ranks wait for each other: {}", fmt::join(others, "; "));
  }

  static bool names(const Finding& finding, int rank) {
    const auto& ranks = finding.verdict.ranks;
    return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  }

  // True if the rank was killed or ended by its own exception: none of its operations had failed.
  bool failed_by_its_own_end() const {
    const auto flight = record_.ranks.find(record_.failure ? record_.failure->rank : -1);
    return flight != record_.ranks.end() && flight->second.ended &&
           std::none_of(flight->second.log.entries.begin(), flight->second.log.entries.end(),
                        [](const FlightEntry& entry) { return entry.failed; });
  }

  static bool is_whole(const RankFlight& flight) {
    return flight.log.begun == static_cast<std::int64_t>(flight.log.entries.size());
  }

  std::vector<int> members(std::int64_t key) const {
    if (auto group = record_.groups.find(key); group != record_.groups.end()) return group->second.ranks;
    std::vector<int> found;
    for (const auto& [rank, entries] : entries_.at(key)) found.push_back(rank);
    return found;
  }

  // One rank's operations in a group.
  const std::vector<const FlightEntry*>& entries(std::int64_t key, int rank) const {
    static const std::vector<const FlightEntry*> kNone;
    const auto& ranks = entries_.at(key);
    const auto found = ranks.find(rank);
    return found != ranks.end() ? found->second : kNone;
  }

  void look_at_collectives(std::int64_t key) {
    std::map<int, Course> courses;
    std::set<std::int64_t> sequences;
    for (int rank : members(key)) {
      const auto flight = record_.ranks.find(rank);
      if (flight == record_.ranks.end()) continue;  // Of a host that was lost.
      Course& course = courses[rank];
      course.whole = is_whole(flight->second);
      for (const FlightEntry* entry : entries(key, rank))
        if (!entry->message) {
          course.calls[entry->sequence] = entry;
          sequences.insert(entry->sequence);
        }
    }
    for (auto sequence : sequences)
      if (differs_at(sequence, courses) || someone_is_missing_at(sequence, courses)) return;
  }

  bool differs_at(std::int64_t sequence, const std::map<int, Course>& courses) {
    std::map<Signature, std::vector<int>> kinds;
    std::int64_t first = std::numeric_limits<std::int64_t>::max();
    for (const auto& [rank, course] : courses)
      if (auto call = course.calls.find(sequence); call != course.calls.end()) {
        kinds[signature(*call->second)].push_back(rank);
        first = std::min(first, call->second->began_ns);
      }
    if (kinds.size() < 2) return false;
    std::vector<std::vector<int>> sides;
    for (auto& [kind, ranks] : kinds) sides.push_back(ranks);
    // The smallest side first; among equals, the one with the lowest rank.
    std::sort(sides.begin(), sides.end(), [](const auto& a, const auto& b) {
      return std::pair(a.size(), a[0]) < std::pair(b.size(), b[0]);
    });
    auto call_of = [&](const std::vector<int>& side) -> const FlightEntry& {
      return *courses.at(side[0]).calls.at(sequence);
    };
    auto brief = [&](const std::vector<int>& side) {
      const FlightEntry& entry = call_of(side);
      const auto what = details(record_, entry);
      return fmt::format("{}{} at {}", entry.operation, what.empty() ? "" : " (" + what + ")", entry.site);
    };
    const FlightEntry& odd = call_of(sides[0]);
    Finding finding;
    finding.at_ns = first;
    auto& verdict = finding.verdict;
    if (sides.size() == 2 && sides[0].size() < sides[1].size()) {
      verdict = about(Kind::differs, sides[0], odd);
      verdict.text = fmt::format(
          "{} diverged first: {}, where {} called {}", listed(sides[0]), describe(record_, odd),
          sides[1].size() + sides[0].size() == courses.size() && sides[1].size() > 1 ? "all other ranks"
                                                                                     : listed(sides[1]),
          brief(sides[1]));
    } else {
      std::vector<int> all;
      std::vector<std::string> parts;
      for (const auto& side : sides) {
        all.insert(all.end(), side.begin(), side.end());
        parts.push_back(fmt::format("{} called {}", listed(side), brief(side)));
      }
      std::sort(all.begin(), all.end());
      verdict = about(Kind::differs, all, odd);
      verdict.text = fmt::format("{} diverged at #{} of group '{}': {}", listed(all), sequence, verdict.group,
                                 fmt::join(parts, ", "));
    }
    findings_.push_back(std::move(finding));
    return true;
  }

  bool someone_is_missing_at(std::int64_t sequence, const std::map<int, Course>& courses) {
    std::vector<int> waiters, missing, idle;
    const FlightEntry* first = nullptr;
    for (const auto& [rank, course] : courses) {
      const auto call = course.calls.find(sequence);
      if (call == course.calls.end()) {
        // If its own operations were overwritten, it may have got further.
        if (course.last() < sequence && (!course.calls.empty() || course.whole)) missing.push_back(rank);
      } else if (is_open(*call->second)) {
        waiters.push_back(rank);
        if (!first || call->second->began_ns < first->began_ns) first = call->second;
      }
    }
    if (missing.empty() || !first) return false;
    std::copy_if(missing.begin(), missing.end(), std::back_inserter(idle),
                 [&](int rank) { return !waiting_.contains(rank); });
    if (const auto& failure = record_.failure;
        failure && std::count(idle.begin(), idle.end(), failure->rank) != 0)
      idle = {failure->rank};  // The others were merely late.
    blame(Kind::did_not_come, idle.empty() ? missing : idle, !idle.empty(), *first,
          fmt::format("did not reach {}, where {} waited", describe(record_, *first), listed(waiters)));
    findings_.back().verdict.text +=
        other_step(courses.at(waiters[0]), courses.at(findings_.back().verdict.ranks[0]), waiters[0]);
    return true;
  }

  // Calls that look the same do not show a skipped step, unless the program calls World::step.
  static std::string other_step(const Course& ours, const Course& theirs, int us) {
    for (const auto& [sequence, call] : theirs.calls) {
      const auto found = ours.calls.find(sequence);
      if (found == ours.calls.end() || call->step < 0 || found->second->step < 0) continue;
      if (call->step == found->second->step) continue;
      const bool from_the_first = call == theirs.calls.begin()->second || found == ours.calls.begin();
      return fmt::format("; since {} #{}{} it was at a different step: {}, while rank {} was at {}",
                         call->operation, sequence, from_the_first ? " or earlier" : "", call->step, us,
                         found->second->step);
    }
    return {};
  }

  // Message numbers are local to each rank, so messages are counted between two ranks, if all are recorded.
  void look_at_messages(std::int64_t key) {
    const auto ranks = members(key);
    for (int rank : ranks) {
      const auto flight = record_.ranks.find(rank);
      if (flight == record_.ranks.end() || !is_whole(flight->second)) continue;
      for (const FlightEntry* each : entries(key, rank)) {
        const FlightEntry& entry = *each;
        if (!entry.message || !is_open(entry) || entry.peer < 0 ||
            entry.peer >= static_cast<int>(ranks.size()))
          continue;
        const int other = ranks[static_cast<std::size_t>(entry.peer)];
        const auto partner = record_.ranks.find(other);
        if (partner == record_.ranks.end() || !is_whole(partner->second)) continue;
        const bool sends = entry.operation == "send";
        const auto ours = count(entries(key, rank), entry.operation, ranks, other, false);
        const auto theirs = count(entries(key, other), sends ? "recv" : "send", ranks, rank, true);
        if (theirs >= ours) continue;
        blame(Kind::no_partner, {other}, !waiting_.contains(other), entry,
              fmt::format("did not {} what rank {} {} in {} ({} of {} begun)", sends ? "receive" : "send",
                          rank, sends ? "sent" : "waited for", describe(record_, entry), theirs, ours));
        break;
      }
    }
  }

  static int count(const std::vector<const FlightEntry*>& entries, std::string_view operation,
                   const std::vector<int>& ranks, int with, bool or_anybody) {
    return static_cast<int>(std::count_if(entries.begin(), entries.end(), [&](const FlightEntry* entry) {
      if (!entry->message || entry->operation != operation) return false;
      if (entry->peer < 0) return or_anybody;
      return entry->peer < static_cast<int>(ranks.size()) &&
             ranks[static_cast<std::size_t>(entry->peer)] == with;
    }));
  }

  FlightVerdict about(Kind kind, std::vector<int> ranks, const FlightEntry& entry) const {
    return {.kind = kind,
            .ranks = std::move(ranks),
            .group = group_name(record_, entry.key),
            .operation = entry.operation,
            .site = entry.site,
            .sequence = entry.sequence};
  }

  void blame(Kind kind, const std::vector<int>& ranks, bool root, const FlightEntry& awaited,
             const std::string& what) {
    Finding finding{.verdict = about(kind, ranks, awaited), .at_ns = awaited.began_ns, .root = root};
    finding.verdict.site.clear();
    const auto& log = record_.ranks.at(ranks[0]).log.entries;
    if (!log.empty()) finding.verdict.site = log.back().site;
    finding.brief = finding.verdict.text = listed(ranks) + " " + what;
    for (std::size_t i = 0; i < ranks.size() && i < 4; ++i)
      finding.verdict.text += "; " +
                              (ranks.size() == 1 ? std::string("its") : fmt::format("rank {}'s", ranks[i])) +
                              " last operation" + last_of(ranks[i], awaited.began_ns);
    findings_.push_back(std::move(finding));
  }

  std::string last_of(int rank, std::int64_t awaited_since) const {
    const RankFlight& flight = record_.ranks.at(rank);
    std::string text = ": not recorded";
    if (flight.log.begun == 0) {
      text = ": none";
    } else if (!flight.log.entries.empty()) {
      const FlightEntry& last = flight.log.entries.back();
      text = " was " + describe(record_, last);
      if (last.ended_ns == 0)
        text += ", which did not end";
      else
        text += fmt::format(", {} {} {}", last.failed ? "which failed" : "which ended",
                            duration_text(std::abs(awaited_since - last.ended_ns)),
                            last.ended_ns <= awaited_since ? "earlier" : "later");
    }
    const auto end = end_of(rank, flight);
    return end.empty() ? text : text + "; it " + end;
  }

  // How the rank ended by itself; signals sent by the launcher afterwards are not reported.
  std::string end_of(int rank, const RankFlight& flight) const {
    const bool failed = record_.failure && record_.failure->rank == rank;
    if (!flight.ended || (!failed && flight.ended->signal)) return {};
    return flight.ended->text();
  }

  FlightVerdict agree() const {
    FlightVerdict verdict;
    const std::string so_far = "the recorded calls of all ranks agree";
    verdict.text = record_.failure ? so_far + ": " + record_.failure->text() : so_far;
    const auto flight = record_.ranks.find(record_.failure ? record_.failure->rank : -1);
    if (flight == record_.ranks.end()) return verdict;
    const auto& entries = flight->second.log.entries;
    if (!entries.empty()) verdict = about(Kind::ended, {}, entries.back());
    verdict.kind = Kind::ended;
    verdict.ranks = {flight->first};
    verdict.text = fmt::format("rank {} was the first to end: {}; until then {}", flight->first,
                               record_.failure->text(), so_far);
    return verdict;
  }

  const FlightRecord& record_;
  std::map<std::int64_t, std::map<int, std::vector<const FlightEntry*>>> entries_;  // By group and rank.
  // Latest time of any entry.
  std::int64_t last_ns_ = 0;
  std::set<int> waiting_;
  std::vector<Finding> findings_;
};

}  // namespace

const char* name(Kind kind) {
  switch (kind) {
    case Kind::ended: return "ended";
    case Kind::differs: return "differs";
    case Kind::did_not_come: return "did_not_come";
    case Kind::no_partner: return "no_partner";
    default: return "agree";
  }
}

FlightVerdict judge(const FlightRecord& record) { return Judge(record).verdict(); }

std::string duration_text(std::int64_t ns) {
  const auto value = static_cast<double>(ns);
  if (value < 1e6) return fmt::format("{:.1f} us", value / 1e3);
  return value < 1e9 ? fmt::format("{:.1f} ms", value / 1e6) : fmt::format("{:.3f} s", value / 1e9);
}

std::string group_name(const FlightRecord& record, std::int64_t key) {
  auto group = record.groups.find(key);
  return group != record.groups.end() ? group->second.name
                                      : fmt::format("{:016x}", static_cast<std::uint64_t>(key));
}

std::string details(const FlightRecord& record, const FlightEntry& entry) {
  std::vector<std::string> parts;
  if (!entry.dtype.empty()) {
    parts.push_back(entry.dtype);
    parts.push_back(counted(entry.count, "element"));
  }
  if (!entry.reduction.empty()) parts.push_back(entry.reduction);
  if (entry.peer >= 0) {
    // Shown as a world rank, like all ranks here.
    int rank = entry.peer;
    if (auto group = record.groups.find(entry.key);
        group != record.groups.end() && entry.peer < static_cast<int>(group->second.ranks.size()))
      rank = group->second.ranks[static_cast<std::size_t>(entry.peer)];
    parts.push_back(fmt::format("{} {}",
                                !entry.message              ? "root"
                                : entry.operation == "send" ? "to rank"
                                                            : "from rank",
                                rank));
  } else if (entry.message) {
    parts.emplace_back("from any rank");
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::string describe(const FlightRecord& record, const FlightEntry& entry) {
  const auto what = details(record, entry);
  return fmt::format("{} #{} of group '{}'{}{}", entry.operation, entry.sequence,
                     group_name(record, entry.key), what.empty() ? "" : " (" + what + ")",
                     entry.site.empty() ? "" : " at " + entry.site);
}

}  // namespace lockstep::detail

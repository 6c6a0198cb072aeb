#include <lockstep/profile/report/arrivals.h>

#include <algorithm>

#include <fmt/format.h>
#include <lockstep/profile/record/intervals.h>

namespace lockstep::profile {

namespace {

constexpr std::size_t kMostRanks = 8;  // maximum that are listed individually

bool earlier(const Arrivals::Of& a, const Arrivals::Of& b) { return a.begin < b.begin; }

}  // namespace

const Arrivals::Of& Arrivals::first() const { return *std::min_element(ranks.begin(), ranks.end(), earlier); }
const Arrivals::Of& Arrivals::last() const { return *std::max_element(ranks.begin(), ranks.end(), earlier); }

std::int64_t Arrivals::middle() const {
  auto sorted = ranks;
  const auto place = sorted.begin() + static_cast<std::ptrdiff_t>((sorted.size() - 1) / 2);
  std::nth_element(sorted.begin(), place, sorted.end(), earlier);
  return place->begin;
}

const GroupOf& group_of(const RankProfile& profile, const Transfer& transfer) {
  return profile.groups[static_cast<std::size_t>(transfer.group)];
}

ArrivalsByCollective arrivals_of(const std::vector<RankProfile>& profiles) {
  ArrivalsByCollective met;
  for (const auto& profile : profiles)
    for (const auto& transfer : profile.transfers) {
      if (detail::point_to_point(transfer.operation)) continue;
      auto& arrivals = met[{group_of(profile, transfer).key, transfer.sequence}];
      arrivals.ranks.push_back({profile.rank, profile.origin + transfer.begin});
      arrivals.last_end = std::max(arrivals.last_end, profile.origin + transfer.end);
    }
  return met;
}

std::string arrival_text(const Arrivals& arrivals) {
  const auto& first = arrivals.first();
  const auto& last = arrivals.last();
  if (arrivals.ranks.size() > kMostRanks)
    return fmt::format(R"({{"first":{},"last":{},"last_after":{:.3f}}})", first.rank, last.rank,
                       milliseconds(last.begin - first.begin));
  std::string text;
  for (const auto& each : arrivals.ranks)
    text += fmt::format(R"({}"{}":{:.3f})", text.empty() ? "" : ",", each.rank,
                        milliseconds(each.begin - first.begin));
  return '{' + text + '}';
}

}  // namespace lockstep::profile

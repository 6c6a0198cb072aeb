#include <lockstep/launch/options.h>

#include <algorithm>
#include <charconv>

#include <fmt/format.h>
#include <lockstep/base/error.h>

namespace lockstep::detail {

RankSet RankSet::parse(std::string_view what, std::string_view text) {
  if (text == "all") return all();
  if (text == "none") return none();
  RankSet set(false);
  const char *at = text.data(), *end = at + text.size();
  auto number = [&](int& value) {
    auto [stop, error] = std::from_chars(at, end, value);
    at = stop;
    return error == std::errc{} && value >= 0;
  };
  for (bool more = true; more;) {
    int first = 0, last = 0;
    bool good = number(first);
    last = first;
    if (good && at != end && *at == '-') good = (++at, number(last));
    more = at != end && *at == ',';
    if (!good || last < first || (at != end && !more))
      throw bad_value(what, "all, none or a list of ranks such as 0,2 or 0-3", text);
    if (more) ++at;
    set.ranges_.emplace_back(first, last);
  }
  return set;
}

bool RankSet::contains(int rank) const {
  return all_ || std::any_of(ranges_.begin(), ranges_.end(),
                             [&](const auto& range) { return range.first <= rank && rank <= range.second; });
}

int RankSet::highest() const {
  int highest = -1;
  for (const auto& range : ranges_) highest = std::max(highest, range.second);
  return highest;
}

}  // namespace lockstep::detail

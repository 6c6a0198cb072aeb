// Pieces of sentences for messages.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace lockstep::detail {

// "1 rank", "3 ranks", "2 processes".
template <typename Number>
std::string counted(Number count, std::string_view one) {
  return fmt::format("{} {}{}", count, one, count == 1 ? "" : one.ends_with('s') ? "es" : "s");
}

// "rank 3", "ranks 0, 2".
inline std::string ranks_text(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

// "'a', 'b' and 3 more".
inline std::string quoted_list(const std::vector<std::string>& names, std::size_t most = 5) {
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), most); ++i)
    text += fmt::format("{}'{}'", i == 0 ? "" : ", ", names[i]);
  if (names.size() > most) text += fmt::format(" and {} more", names.size() - most);
  return text;
}

}  // namespace lockstep::detail

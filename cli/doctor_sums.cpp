// Reports the order in which the ranks of a job sum, given the number of ranks on each host.
#include <charconv>
#include <numeric>
#include <sstream>

#include <fmt/format.h>
#include <lockstep/base/environment.h>
#include <lockstep/comm/transports/hierarchy/engine/hosts.h>

#include "doctor_rows.h"

namespace lockstep::cli {
namespace {

constexpr int kMost = 1 << 16;

// Parses SLURM's notation: "2(x3),1" is 2, 2, 2, 1. Empty for anything else.
std::vector<int> tasks_per_node(const std::string& text) {
  std::vector<int> tasks;
  std::istringstream in(text);
  for (std::string word; std::getline(in, word, ',');) {
    int each = 0, nodes = 1;
    const char *end = word.data() + word.size(), *next = nullptr;
    auto read = [&](const char* from, int& number) {
      const auto [after, error] = std::from_chars(from, end, number);
      next = after;
      return error == std::errc() && number > 0 && number <= kMost;
    };
    if (!read(word.data(), each)) return {};
    if (next != end && (!std::string_view(next, end).starts_with("(x") || !read(next + 2, nodes))) return {};
    tasks.insert(tasks.end(), static_cast<std::size_t>(nodes), each);
    if (tasks.size() > kMost) return {};
  }
  return tasks;
}

}  // namespace

Rows sum_rows(int ranks, std::vector<int> per_host) {
  Row row{"order of sums", {}};
  std::string where;
  if (per_host.empty() && ranks > 0) per_host = {ranks};
  const char* step =
      env::text("SLURM_STEP_TASKS_PER_NODE") ? "SLURM_STEP_TASKS_PER_NODE" : "SLURM_TASKS_PER_NODE";
  if (per_host.empty()) {
    per_host = tasks_per_node(env::text(step).value_or(""));
    if (!per_host.empty()) where = fmt::format("{}: ", step);
  }
  const bool in_turn = !where.empty() && env::text("SLURM_DISTRIBUTION").value_or("").starts_with("cyclic");
  if (per_host.empty()) {
    row.finding =
        "on one host, and with the same power of two of ranks on each host: the tree over ranks; "
        "use --hosts 2,1 to show other layouts";
    return {row};
  }

  std::vector<int> nodes;
  auto left = per_host;
  const auto total = std::accumulate(per_host.begin(), per_host.end(), 0L);
  for (std::size_t host = 0; nodes.size() < static_cast<std::size_t>(total); ++host) {
    const auto number = host % left.size();
    const int now = in_turn ? std::min(1, left[number]) : left[number];
    nodes.insert(nodes.end(), static_cast<std::size_t>(now), static_cast<int>(number));
    left[number] -= now;
  }
  const hierarchy::Hosts hosts(nodes, 0);
  row.finding = where + hosts.text() + (in_turn ? " in turn" : "") + ": " + hierarchy::order_of_sums(hosts);
  row.values = {{"ranks", per_host}, {"follows_tree", hosts.follow_tree()}};
  if (!hosts.follow_tree()) {
    row.verdict = Verdict::note;
    row.hint = in_turn ? "srun --distribution=block places consecutive ranks on the same host"
                       : "to sum by the tree, use the same power of two of ranks on each host, or fewer on "
                         "the last";
  }
  return {row};
}

}  // namespace lockstep::cli

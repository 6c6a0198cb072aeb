#include <lockstep/schedule/cut.h>

#include <algorithm>
#include <limits>

namespace lockstep::detail {

std::vector<int> balanced_cut(const std::vector<double>& costs, int stages) {
  const auto pieces = static_cast<int>(costs.size());
  std::vector<double> until(costs.size() + 1);
  for (std::size_t i = 0; i < costs.size(); ++i) until[i + 1] = until[i] + costs[i];
  const auto between = [&](int first, int last) {
    return until[static_cast<std::size_t>(last)] - until[static_cast<std::size_t>(first)];
  };
  // worst[s][i]: cost of the best cut of pieces i, i + 1, ... into s stages. ends[s][i]: end of its first
  // stage.
  const auto width = static_cast<std::size_t>(pieces) + 1, height = static_cast<std::size_t>(stages) + 1;
  std::vector<std::vector<double>> worst(height,
                                         std::vector<double>(width, std::numeric_limits<double>::infinity()));
  std::vector<std::vector<int>> ends(height, std::vector<int>(width));
  worst[0][width - 1] = 0;
  for (std::size_t s = 1; s < height; ++s)
    for (int i = pieces - 1; i >= 0; --i)
      for (int end = pieces; end > i; --end) {
        const double cost = std::max(between(i, end), worst[s - 1][static_cast<std::size_t>(end)]);
        if (cost >= worst[s][static_cast<std::size_t>(i)]) continue;
        worst[s][static_cast<std::size_t>(i)] = cost;
        ends[s][static_cast<std::size_t>(i)] = end;
      }
  std::vector<int> cut;
  for (int i = 0, s = stages; s > 0; --s) {
    const int end = ends[static_cast<std::size_t>(s)][static_cast<std::size_t>(i)];
    cut.push_back(end - i);
    i = end;
  }
  return cut;
}

}  // namespace lockstep::detail

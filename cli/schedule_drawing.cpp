#include "schedule_drawing.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

namespace lockstep::cli {
namespace {

struct Look {
  int terminal;  // Index into the 256-colour palette.
  const char* svg;
};

Look look_of(PipelineOp op) {
  switch (op) {
    case PipelineOp::forward: return {33, "#4a90d9"};
    case PipelineOp::backward: return {34, "#5aa469"};
    case PipelineOp::input_backward: return {37, "#43a5a5"};
    case PipelineOp::weight_backward: return {172, "#d9964a"};
    default: return {245, "#999999"};
  }
}

bool takes_time(PipelineOp op) { return op < PipelineOp::send_forward; }

// Omits the stage if each rank has only one, because the row identifies it.
std::string label_of(const PipelineSchedule& schedule, PipelineAction action) {
  const auto text = to_string(action);
  return schedule.num_stages() == schedule.num_ranks() ? text.substr(std::to_string(action.stage).size())
                                                       : text;
}

// Calls visit(rank, number, action) for each action that takes time.
template <typename Visit>
void each_drawn(const PipelineSchedule& schedule, const SimulatedSchedule& run, Visit visit) {
  for (std::size_t r = 0; r < schedule.ranks.size(); ++r)
    for (std::size_t n = 0; n < schedule.ranks[r].size(); ++n)
      if (const auto& action = schedule.ranks[r][n];
          takes_time(action.op) && run.ends[r][n] > run.begins[r][n])
        visit(r, n, action);
}

// The smallest number of columns, or points, per unit of time that fits every label.
double scale_for(const PipelineSchedule& schedule, const SimulatedSchedule& run, double letter,
                 double space) {
  double scale = 0;
  each_drawn(schedule, run, [&](std::size_t r, std::size_t n, PipelineAction action) {
    const double wanted = static_cast<double>(label_of(schedule, action).size()) * letter + space;
    scale = std::max(scale, wanted / (run.ends[r][n] - run.begins[r][n]));
  });
  return scale;
}

std::string escaped(const std::string& text) {
  std::string safe;
  for (const char letter : text)
    safe += letter == '<' ? "&lt;" : letter == '&' ? "&amp;" : std::string(1, letter);
  return safe;
}

}  // namespace

std::string drawn_as_text(const PipelineSchedule& schedule, const SimulatedSchedule& run, bool colors) {
  const double scale = scale_for(schedule, run, 1, 1);
  auto column = [&](double time) { return static_cast<std::size_t>(std::lround(time * scale)); };
  std::vector<std::string> rows(schedule.ranks.size());
  std::vector<std::size_t> at(schedule.ranks.size(), 0);
  each_drawn(schedule, run, [&](std::size_t r, std::size_t n, PipelineAction action) {
    const auto begin = column(run.begins[r][n]), end = column(run.ends[r][n]);
    rows[r].append(begin - at[r], ' ');
    auto cell = label_of(schedule, action);
    cell.resize(end - begin, ' ');
    rows[r] +=
        colors ? fmt::format("\033[48;5;{};38;5;231m{}\033[0m", look_of(action.op).terminal, cell) : cell;
    at[r] = end;
  });
  std::string text;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    while (rows[r].ends_with(' ')) rows[r].pop_back();
    text += fmt::format("rank {:<3}{}\n", r, rows[r]);
  }
  return text;
}

std::string drawn_as_svg(const PipelineSchedule& schedule, const SimulatedSchedule& run,
                         const std::string& title) {
  constexpr double kLeft = 64, kTop = 40, kRow = 28, kLetter = 7, kGap = 1;
  const double scale = scale_for(schedule, run, kLetter, 6);
  const double width = kLeft + run.makespan * scale + 16;
  const double height = kTop + kRow * static_cast<double>(schedule.ranks.size()) + 12;
  std::string text = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} "
      "{1:.0f}\" "
      "font-family=\"monospace\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
      "<text x=\"8\" y=\"22\" font-size=\"13\">{2}</text>\n",
      width, height, escaped(title));
  for (std::size_t r = 0; r < schedule.ranks.size(); ++r)
    text += fmt::format("<text x=\"8\" y=\"{:.1f}\">rank {}</text>\n",
                        kTop + kRow * static_cast<double>(r) + 17, r);
  each_drawn(schedule, run, [&](std::size_t r, std::size_t n, PipelineAction action) {
    const double x = kLeft + run.begins[r][n] * scale, y = kTop + kRow * static_cast<double>(r);
    const double wide = (run.ends[r][n] - run.begins[r][n]) * scale;
    text += fmt::format(
        "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"{}\"/>"
        "<text x=\"{:.1f}\" y=\"{:.1f}\" fill=\"white\" text-anchor=\"middle\">{}</text>\n",
        x, y, std::max(wide - kGap, 0.5), kRow - 4, look_of(action.op).svg, x + wide / 2, y + 16,
        label_of(schedule, action));
  });
  return text + "</svg>\n";
}

}  // namespace lockstep::cli

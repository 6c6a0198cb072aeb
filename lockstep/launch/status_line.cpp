#include <lockstep/launch/status_line.h>

#include <cmath>

#include <fmt/format.h>

namespace lockstep::detail {
namespace {

// About three digits, whatever the magnitude.
std::string rate(double value) {
  return value < 10    ? fmt::format("{:.2f}", value)
         : value < 100 ? fmt::format("{:.1f}", value)
                       : fmt::format("{:.0f}", value);
}

}  // namespace

std::string status_text(const control::Status& status) {
  auto text = fmt::format("step {}", status.step);
  const bool paced = status.steps_per_second > 0;
  if (paced) text += fmt::format(" | {} steps/s", rate(status.steps_per_second));
  for (const auto& metric : status.metrics) {
    if (metric.name == "samples") {
      if (paced && std::isfinite(metric.value))
        text += fmt::format(" | {} samples/s", rate(metric.value * status.steps_per_second));
    } else {
      std::string name = metric.name;
      for (std::size_t i = 0; i < name.size(); ++i) {
        const auto c = static_cast<unsigned char>(name[i]);
        if (c < ' ' || c == 0x7f) name[i] = '?';
        // U+0080 to U+009F: control characters to some terminals.
        const auto next = i + 1 < name.size() ? static_cast<unsigned char>(name[i + 1]) : 0;
        if (c == 0xc2 && next >= 0x80 && next < 0xa0) name[i] = name[i + 1] = '?';
      }
      text += fmt::format(" | {} {:.4g}", name, metric.value);
    }
  }
  if (status.waiting >= 0) text += fmt::format(" | waiting {:.0f}%", 100 * status.waiting);
  if (status.slowest >= 0)
    text += fmt::format(" | slowest rank {} ({:.1f}x)", status.slowest, status.slowness);
  return text;
}

std::string cut_to_columns(std::string_view text, int columns) {
  int used = 0;
  std::size_t end = 0;
  while (end < text.size()) {
    const auto first = static_cast<unsigned char>(text[end]);
    std::size_t next = end + 1;
    while (next < text.size() && (static_cast<unsigned char>(text[next]) & 0xc0) == 0x80) ++next;
    used += first < 0x80 ? 1 : 2;
    if (used > columns) break;
    end = next;
  }
  return std::string(text.substr(0, end));
}

}  // namespace lockstep::detail

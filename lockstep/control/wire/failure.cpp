#include <lockstep/control/wire/failure.h>

#include <cstring>

#include <fmt/format.h>

namespace lockstep::control {

std::string Ended::text() const {
  std::string text;
  if (signal) {
    const char* name = ::sigabbrev_np(*signal);
    text = fmt::format("was killed by signal {} (SIG{}){}", *signal, name ? name : "?",
                       core ? ", core dumped" : "");
  } else if (status) {
    text = fmt::format("exited with status {}", *status);
  } else {
    text = "has ended";
  }
  return note.empty() ? text : text + ": " + note;
}

std::string Failure::text() const {
  std::string text = rank < 0 ? cause : fmt::format("rank {} (pid {}) {}", rank, pid, cause);
  if (!where.empty()) text += ", " + where;
  if (step >= 0) text += fmt::format(", step {}", step);
  return text;
}

namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Removes what differs in each attempt: process numbers and times ("after 0.018 s").
std::string lasting_part(const std::string& text) {
  std::string kept;
  for (std::size_t at = 0; at < text.size();) {
    if (!is_digit(text[at])) {
      kept += text[at++];
      continue;
    }
    auto end = at;
    bool point = false;
    while (end < text.size() && (is_digit(text[end]) || (text[end] == '.' && !point)))
      point |= text[end++] == '.';
    const bool time = point && text.compare(end, 2, " s") == 0;
    const bool process = kept.ends_with("pid ") || kept.ends_with("process ");
    if (!time && !process) kept.append(text, at, end - at);
    at = end;
  }
  return kept;
}

}  // namespace

bool Failure::same_as(const Failure& other) const {
  const bool place_is_known = step >= 0 || sequence >= 0;
  return place_is_known && rank == other.rank && step == other.step &&
         (step >= 0 || sequence == other.sequence) && lasting_part(cause) == lasting_part(other.cause);
}

}  // namespace lockstep::control

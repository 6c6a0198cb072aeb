#include <lockstep/control/failure.h>

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

bool Failure::same_as(const Failure& other) const {
  return rank == other.rank && cause == other.cause && step == other.step &&
         (step >= 0 || sequence == other.sequence);
}

}  // namespace lockstep::control

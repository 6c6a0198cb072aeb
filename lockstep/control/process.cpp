#include <lockstep/control/process.h>

#include <sys/wait.h>

#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

#include <fmt/format.h>

namespace lockstep::control {

std::optional<ProcessState> look_at(int pid) {
  std::ifstream in(fmt::format("/proc/{}/stat", pid));
  const std::string text(std::istreambuf_iterator<char>(in), {});
  const auto name_end = text.rfind(')');  // the name may hold anything, also brackets
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(text.substr(name_end + 1));
  ProcessState process;
  fields >> process.state;
  constexpr int kFlags = 9, kExitCode = 52;  // counted as proc(5) does; the state is the third
  constexpr unsigned long kExiting = 0x4;
  std::string field;
  for (int number = 4; number <= kExitCode && fields >> field; ++number) {
    if (number == kFlags) process.ending = (std::stoul(field) & kExiting) != 0;
    if (number == kExitCode) process.code = std::stoi(field);
  }
  if (process.state == 'Z' || process.state == 'X') process.ending = true;
  if (process.state == 't') {
    std::ifstream status(fmt::format("/proc/{}/status", pid));
    for (std::string line; std::getline(status, line);)
      if (line.starts_with("TracerPid:")) process.tracer = std::stoi(line.substr(10));
  }
  return process;
}

Ended how_it_ended(int pid) {
  Ended ended;
  ended.pid = pid;
  const auto process = look_at(pid);
  if (!process) return ended;
  if (!process->ending) {
    ended.note = "its connection to the control plane was closed while the process still runs";
  } else if (WIFSIGNALED(process->code)) {
    ended.signal = WTERMSIG(process->code);
    ended.core = WCOREDUMP(process->code);
  } else {
    ended.status = WEXITSTATUS(process->code);
  }
  return ended;
}

}  // namespace lockstep::control

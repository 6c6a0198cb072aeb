#include <lockstep/launch/identity/ancestors.h>

#include <unistd.h>

#include <algorithm>
#include <utility>

#include <lockstep/control/agent/process.h>

namespace lockstep::detail {

constexpr std::size_t kMostAncestors = 64;

std::vector<Process> ancestors() {
  std::vector<Process> found;
  int pid = ::getppid();
  while (pid > 0 && found.size() < kMostAncestors) {
    auto state = control::look_at(pid);
    if (!state) break;
    Process process{pid, std::move(state->name), state->start, control::proc_text(pid, "cmdline")};
    std::replace(process.title.begin(), process.title.end(), '\0', ' ');
    found.push_back(std::move(process));
    pid = state->parent;
  }
  return found;
}

}  // namespace lockstep::detail

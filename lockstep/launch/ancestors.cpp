#include <lockstep/launch/ancestors.h>

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>

#include <fmt/format.h>

namespace lockstep::detail {
namespace {

constexpr std::size_t kMostAncestors = 64;

std::string text_of(int pid, const char* file) {
  std::ifstream in(fmt::format("/proc/{}/{}", pid, file));
  return {std::istreambuf_iterator<char>(in), {}};
}

// "pid (name) state parent ...", where the name may have blanks and brackets of its own.
std::optional<Process> process_of(int pid, int& parent) {
  const auto text = text_of(pid, "stat");
  const auto open = text.find('('), close = text.rfind(')');
  if (open == std::string::npos || close == std::string::npos || close < open) return std::nullopt;
  Process process{pid, text.substr(open + 1, close - open - 1), 0, text_of(pid, "cmdline")};
  std::replace(process.title.begin(), process.title.end(), '\0', ' ');
  std::istringstream rest(text.substr(close + 1));
  std::string skipped;
  rest >> skipped >> parent;
  constexpr int kFieldsBetween = 17;  // from the parent, which is number 4, to the start, which is number 22
  for (int i = 0; i < kFieldsBetween; ++i) rest >> skipped;
  rest >> process.start;
  return rest ? std::optional(process) : std::nullopt;
}

}  // namespace

std::vector<Process> ancestors() {
  std::vector<Process> found;
  int pid = ::getppid();
  while (pid > 0 && found.size() < kMostAncestors) {
    int parent = 0;
    auto process = process_of(pid, parent);
    if (!process) break;
    found.push_back(*std::move(process));
    pid = parent;
  }
  return found;
}

}  // namespace lockstep::detail

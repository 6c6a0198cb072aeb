#include <lockstep/launch/descendants.h>

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <thread>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/control/agent/process.h>

namespace lockstep::detail {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

std::vector<pid_t> numbers_in(const fs::path& folder) {
  std::vector<pid_t> numbers;
  std::error_code error;  // The folder may vanish while it is read.
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename();
    pid_t number = 0;
    auto [stop, problem] = std::from_chars(name.data(), name.data() + name.size(), number);
    if (problem == std::errc{} && stop == name.data() + name.size()) numbers.push_back(number);
  }
  return numbers;
}

// The kernel may have been built without the lists of children.
bool kernel_lists_children() {
  static const bool lists = ::access("/proc/thread-self/children", R_OK) == 0;
  return lists;
}

}  // namespace

void check_proc() {
  std::error_code error;
  const auto self = fs::read_symlink("/proc/self", error).string();
  if (self == std::to_string(::getpid())) return;
  const auto mount = "mount -t proc proc /proc (unshare: --mount-proc)";
  // A /proc of an outer namespace may not list this process at all.
  if (std::error_code none; self.empty() && !fs::exists("/proc/stat", none))
    throw ConfigError(
        fmt::format("no /proc, which is needed to find ranks and their descendants: {}", mount));
  throw ConfigError(fmt::format(
      "/proc is of another pid namespace: this process is {} here and '{}' there; mount this namespace's "
      "/proc: {}",
      ::getpid(), self, mount));
}

std::vector<pid_t> children(pid_t pid) {
  std::vector<pid_t> found;
  if (kernel_lists_children()) {
    const auto tasks = fs::path("/proc") / std::to_string(pid) / "task";
    for (pid_t task : numbers_in(tasks)) {
      std::ifstream list(tasks / std::to_string(task) / "children");
      found.insert(found.end(), std::istream_iterator<pid_t>(list), std::istream_iterator<pid_t>());
    }
  } else {
    for (pid_t each : numbers_in("/proc")) {
      const auto state = control::look_at(each);
      if (state && state->parent == pid) found.push_back(each);
    }
  }
  return found;
}

std::vector<pid_t> descendants(const std::vector<pid_t>& spare) {
  std::vector<pid_t> found = {::getpid()};
  for (std::size_t i = 0; i < found.size(); ++i)
    for (pid_t child : children(found[i]))
      // Never this process itself, whatever /proc lists.
      if (child != ::getpid() && std::find(spare.begin(), spare.end(), child) == spare.end())
        found.push_back(child);
  found.erase(found.begin());
  std::erase_if(found, [](pid_t pid) {
    const auto state = control::look_at(pid);
    return !state || state->state == 'Z' || state->state == 'X';
  });
  return found;
}

std::vector<pid_t> end_descendants(std::chrono::milliseconds limit, const std::function<void()>& reap,
                                   const std::vector<pid_t>& spare) {
  const auto deadline = Clock::now() + limit;
  for (auto pause = std::chrono::milliseconds(1);;
       pause = std::min(2 * pause, std::chrono::milliseconds(50))) {
    reap();
    auto left = descendants(spare);
    if (left.empty() || Clock::now() >= deadline) return left;
    std::set<pid_t> frozen;
    for (bool found = true; found; left = descendants(spare)) {
      found = false;
      for (pid_t pid : left)
        if (frozen.insert(pid).second) {
          ::kill(pid, SIGSTOP);
          found = true;
        }
    }
    for (pid_t pid : left) ::kill(pid, SIGKILL);
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace lockstep::detail

#include <lockstep/control/agent/process.h>

#include <dirent.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <string>

#include <fmt/format.h>

namespace lockstep::control {

// With plain system calls: streams throw if the process ends between open and read.
std::string proc_text(int pid, const char* file) {
  const int fd = ::open(fmt::format("/proc/{}/{}", pid, file).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  std::string text;
  char bytes[4096];
  for (ssize_t n = 0; (n = ::read(fd, bytes, sizeof bytes)) > 0;)
    text.append(bytes, static_cast<std::size_t>(n));
  ::close(fd);
  return text;
}

bool has_active_thread(int pid) {
  const std::unique_ptr<DIR, int (*)(DIR*)> threads(::opendir(fmt::format("/proc/{}/task", pid).c_str()),
                                                    ::closedir);
  while (const dirent* thread = threads ? ::readdir(threads.get()) : nullptr) {
    if (thread->d_name[0] == '.') continue;
    const auto file = [&](const char* name) {
      return proc_text(pid, fmt::format("task/{}/{}", thread->d_name, name).c_str());
    };
    const auto stat = file("stat");
    const auto begin = stat.find('('), close = stat.rfind(')');
    if (close == std::string::npos || close + 2 >= stat.size()) continue;
    if (stat.compare(begin + 1, 9, "lockstep-") == 0) continue;
    const char state = stat[close + 2];
    if (state == 'R' || state == 'D') return true;
    const auto waits_in = file("wchan");  // A kernel function; "0" if it is hidden.
    const auto idle = {"0",           "futex_",  "poll_",    "do_poll",
                       "do_sys_poll", "ep_poll", "do_epoll", "do_sigtimedwait"};
    if (!waits_in.empty() &&
        std::none_of(idle.begin(), idle.end(), [&](const char* each) { return waits_in.starts_with(each); }))
      return true;
  }
  return false;
}

std::optional<ProcessState> look_at(int pid) {
  const std::string text = proc_text(pid, "stat");
  const auto name_begin = text.find('('), name_end = text.rfind(')');  // The name may contain brackets too.
  if (name_begin == std::string::npos || name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(text.substr(name_end + 1));
  ProcessState process;
  process.name = text.substr(name_begin + 1, name_end - name_begin - 1);
  fields >> process.state;
  // Field numbers as in proc(5); the state is the third.
  constexpr int kParent = 4, kFlags = 9, kStart = 22, kExitCode = 52;
  constexpr unsigned long kExiting = 0x4;
  std::string field;
  for (int number = kParent; number <= kExitCode && fields >> field; ++number) {
    if (number == kParent) process.parent = std::stoi(field);
    if (number == kStart) process.start = std::stoull(field);
    if (number == kFlags) process.ending = (std::stoul(field) & kExiting) != 0;
    if (number == kExitCode) process.code = std::stoi(field);
  }
  const bool held = process.state == 'T' || process.state == 't';
  if (process.state == 'Z' || process.state == 'X') process.ending = true;
  // Some thread may already be ending, or the process writes its core: then the exit code is set. (For a
  // stopped process it is the signal that stopped it.)
  if (!held && process.code != 0) process.ending = true;
  if (process.state == 't') {
    const auto status = proc_text(pid, "status");
    if (auto tracer = status.find("TracerPid:"); tracer != std::string::npos)
      process.tracer = std::atoi(status.c_str() + tracer + 10);
  }
  return process;
}

Ended how_it_ended(int pid, const std::optional<ProcessState>& process) {
  Ended ended;
  ended.pid = pid;
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

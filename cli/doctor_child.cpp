#include "doctor_child.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <string_view>
#include <system_error>

#include <fmt/format.h>
#include <lockstep/base/environment.h>

namespace lockstep::cli {
namespace {

using Clock = std::chrono::steady_clock;

bool is_of_a_launcher(std::string_view variable) {
  for (std::string_view name : {"RANK=", "WORLD_SIZE=", "LOCAL_RANK=", "LOCAL_WORLD_SIZE=", "MASTER_ADDR=",
                                "MASTER_PORT=", "GROUP_RANK=", "OMPI_COMM_WORLD_", "PMI_", "PMIX_",
                                "MPI_LOCAL", "SLURM_", "TORCHELASTIC_", "LOCKSTEP_"})
    if (variable.starts_with(name)) return true;
  return false;
}

std::vector<std::string> environment_of_child() {
  std::vector<std::string> variables;
  for (char** each = environ; *each != nullptr; ++each)
    if (!is_of_a_launcher(*each)) variables.emplace_back(*each);
  return variables;
}

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (auto& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

void read_what_is_there(int fd, std::string& output) {
  std::array<char, 4096> buffer;
  for (ssize_t got; (got = ::read(fd, buffer.data(), buffer.size())) > 0;)
    output.append(buffer.data(), static_cast<std::size_t>(got));
}

}  // namespace

ChildOutcome run_child(const std::vector<std::string>& command, std::chrono::milliseconds limit) {
  // Allocates everything before the fork, because another thread may hold the allocator's lock.
  auto arguments = command, variables = environment_of_child();
  const auto argv = pointers_to(arguments), envp = pointers_to(variables);
  ::signal(SIGCHLD, SIG_DFL);  // A parent may have ignored it, and then waitpid finds no child.
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
  const pid_t parent = ::getpid(), pid = ::fork();
  if (pid < 0) {
    const int error = errno;
    ::close(ends[0]);
    ::close(ends[1]);
    return {127, false, fmt::format("cannot start {}: {}\n", command[0], std::strerror(error))};
  }
  if (pid == 0) {
    // The child stays in this process group, so that Ctrl-C reaches it. Launchers end their ranks at SIGTERM.
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) ::_exit(1);
    const int null = ::open("/dev/null", O_RDONLY);
    ::dup2(null, STDIN_FILENO);
    ::dup2(ends[1], STDOUT_FILENO);
    ::dup2(ends[1], STDERR_FILENO);
    ::execvpe(argv[0], argv.data(), envp.data());
    const char* why = ::strerrordesc_np(errno);
    for (const char* part : {"cannot start ", command[0].c_str(), ": ", why ? why : "?", "\n"}) {
      if (::write(STDERR_FILENO, part, std::strlen(part)) < 0) break;
    }
    ::_exit(127);
  }
  ::close(ends[1]);
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);

  ChildOutcome outcome;
  const auto deadline = Clock::now() + limit, last = deadline + std::chrono::seconds(5);
  int status = 0;
  // Waits for the child, not for the end of its output: processes it left behind may hold the pipe open.
  while (::waitpid(pid, &status, WNOHANG) == 0) {
    if (!outcome.late && Clock::now() >= deadline) {
      outcome.late = true;
      ::kill(pid, SIGTERM);
    }
    if (Clock::now() >= last) ::kill(pid, SIGKILL);
    pollfd wait{ends[0], POLLIN, 0};
    ::poll(&wait, 1, 20);
    read_what_is_there(ends[0], outcome.output);
    if ((wait.revents & POLLHUP) != 0) ::usleep(1000);  // No more output will come, and poll returns at once.
  }
  read_what_is_there(ends[0], outcome.output);
  ::close(ends[0]);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return outcome;
}

std::string ChildOutcome::complaint() const {
  // The first line that mentions an error names the cause; the lines after it are mostly consequences.
  std::istringstream lines(output);
  std::string fallback;
  for (std::string line; std::getline(lines, line);) {
    if (line.find_first_not_of(" -=*\t") == std::string::npos) continue;
    if (fallback.empty()) fallback = line;
    for (const char* word : {"rror", "annot", "could not", "failed", "ailure", "not found"})
      if (line.find(word) != std::string::npos) return line;
  }
  if (!fallback.empty()) return fallback;
  return status > 128 ? fmt::format("signal {}", status - 128) : fmt::format("exit status {}", status);
}

std::string find_in_path(const std::string& name) {
  std::istringstream folders(env::text("PATH").value_or("/usr/local/bin:/usr/bin:/bin"));
  for (std::string folder; std::getline(folders, folder, ':');) {
    const auto path = (folder.empty() ? "." : folder) + "/" + name;
    if (::access(path.c_str(), X_OK) == 0) return path;
  }
  return {};
}

}  // namespace lockstep::cli

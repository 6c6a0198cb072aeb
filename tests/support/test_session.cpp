// Runs a test program in a session of its own and cleans up after it:
//
//   test_session [--limit SECONDS] PROGRAM [ARGUMENT...]
//
// - No signal meant for the caller's terminal or process group reaches the program, except INT, TERM and HUP,
//   which are forwarded to its process group.
// - The program and its descendants are killed when this process or its parent dies.
// - Descendants that outlive the program get two seconds to end, and are then killed and named.
// - After SECONDS the program gets TERM, and whatever has not ended 10 s later is killed. CTest cannot send
//   TERM before 3.27.
// - TMPDIR is a new folder, which is removed afterwards, so that tests that run in parallel share no files.
//
// Exits with the program's status, 128 + the number of the signal that ended it, or 124 after the limit.
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kGraceAfterSignal(10), kGraceAfterExit(2);

std::vector<pid_t> children_of(pid_t parent) {
  std::vector<pid_t> found;
  DIR* proc = ::opendir("/proc");
  if (proc == nullptr) return found;
  while (const dirent* entry = ::readdir(proc)) {
    const pid_t pid = std::atoi(entry->d_name);
    if (pid <= 0) continue;
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    std::string line;
    std::getline(file, line);
    // The name is in parentheses and may hold any character, so fields count from the last ')'.
    const auto end = line.rfind(')');
    if (end == std::string::npos) continue;
    std::istringstream fields(line.substr(end + 1));
    char state = 0;
    pid_t its_parent = 0;
    if (fields >> state >> its_parent && its_parent == parent && state != 'Z') found.push_back(pid);
  }
  ::closedir(proc);
  return found;
}

std::string command_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/cmdline");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  for (auto& c : text)
    if (c == '\0') c = ' ';
  return text.substr(0, 200);
}

// Reaps every child that has ended. False once there are no children.
bool reap(pid_t program, int* status) {
  for (;;) {
    int one = 0;
    const pid_t pid = ::waitpid(-1, &one, WNOHANG);
    if (pid == program) *status = one;
    if (pid == 0) return true;
    if (pid < 0) return errno == EINTR;
  }
}

// This process is the subreaper: a descendant becomes its child when the processes between them have died.
void kill_all(bool report) {
  std::set<pid_t> killed;
  const auto give_up = Clock::now() + kGraceAfterSignal;
  for (int status = 0; reap(-1, &status) && Clock::now() < give_up;) {
    for (const pid_t pid : children_of(::getpid())) {
      if (killed.insert(pid).second && report)
        ::fprintf(stderr, "test_session: killed a process that outlived the test: %d %s\n", pid,
                  command_of(pid).c_str());
      ::kill(pid, SIGKILL);
    }
    ::usleep(1000);
  }
}

// A folder in TMPDIR, with a short name: paths of sockets are limited to 107 characters.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    path_ = (std::filesystem::temp_directory_path() / "ls-XXXXXX").string();
    if (::mkdtemp(path_.data()) == nullptr) {
      ::perror(("test_session: cannot create " + path_).c_str());
      std::exit(126);
    }
    ::setenv("TMPDIR", path_.c_str(), 1);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;

 private:
  std::string path_;
};

int run(char** command, std::chrono::seconds limit) {
  const pid_t parent = ::getppid();
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  if (::getppid() != parent) return 128 + SIGTERM;  // It died before prctl.
  const TemporaryFolder folder;

  sigset_t signals, before;
  ::sigemptyset(&signals);
  for (const int signal : {SIGCHLD, SIGINT, SIGTERM, SIGHUP}) ::sigaddset(&signals, signal);
  ::sigprocmask(SIG_BLOCK, &signals, &before);

  const pid_t self = ::getpid(), program = ::fork();
  if (program < 0) {
    ::perror("test_session: fork");
    return 126;
  }
  if (program == 0) {
    ::setsid();
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != self) ::_exit(126);
    ::sigprocmask(SIG_SETMASK, &before, nullptr);
    ::execvp(command[0], command);
    ::fprintf(stderr, "test_session: cannot run %s: %s\n", command[0], ::strerror(errno));
    ::_exit(127);
  }

  int status = -1;
  auto kill_at = Clock::time_point::max();
  const auto begin = Clock::now();
  bool ended = false, killed = false, timed_out = false;
  for (;;) {
    const bool children = reap(program, &status);
    if (!ended && status != -1) {
      ended = true;
      kill_at = std::min(kill_at, Clock::now() + kGraceAfterExit);
    }
    if (!children) break;
    if (Clock::now() >= kill_at) {
      killed = true;
      break;
    }
    if (!ended && !timed_out && Clock::now() - begin >= limit) {
      timed_out = true;
      ::fprintf(stderr, "test_session: the test took longer than %ld s\n", static_cast<long>(limit.count()));
      ::kill(-program, SIGTERM);
      kill_at = std::min(kill_at, Clock::now() + kGraceAfterSignal);
    }
    const timespec look{0, ended ? 10'000'000 : 200'000'000};
    const int signal = ::sigtimedwait(&signals, nullptr, &look);
    if (signal == SIGINT || signal == SIGTERM || signal == SIGHUP) {
      ::kill(-program, signal);
      kill_at = std::min(kill_at, Clock::now() + kGraceAfterSignal);
    }
  }
  if (killed) {
    if (!ended) ::kill(-program, SIGKILL);
    kill_all(ended);
  }
  if (timed_out) return 124;
  if (status == -1) return 128 + SIGKILL;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

int main(int argc, char** argv) {
  const bool limited = argc > 2 && std::string(argv[1]) == "--limit";
  char** const command = argv + (limited ? 3 : 1);
  const std::chrono::seconds limit(limited ? std::atol(argv[2]) : 1'000'000);
  if (*command == nullptr || limit.count() <= 0) {
    ::fprintf(stderr, "usage: %s [--limit SECONDS] PROGRAM [ARGUMENT...]\n", argv[0]);
    return 2;
  }
  return run(command, limit);
}

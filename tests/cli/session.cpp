#include "cli/session.h"

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

namespace lockstep::testing {
namespace {

using Clock = std::chrono::steady_clock;

std::string text_of(const std::filesystem::path& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

std::vector<pid_t> all_processes() {
  std::vector<pid_t> pids;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (std::all_of(name.begin(), name.end(), [](unsigned char c) { return std::isdigit(c); }))
      pids.push_back(std::stoi(name));
  }
  return pids;
}

[[noreturn]] void become(const std::vector<std::string>& command, const Session::Options& options) {
  for (const char* name :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GTEST_OUTPUT", "NO_COLOR"})
    ::unsetenv(name);
  if (options.terminal) ::setenv("TERM", "xterm", 1);
  for (const auto& [name, value] : options.environment) ::setenv(name.c_str(), value.c_str(), 1);
  std::vector<char*> arguments;
  for (const auto& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  ::execvp(arguments[0], arguments.data());
  ::_exit(127);
}

}  // namespace

Session::Session(const std::vector<std::string>& command, Options options) : terminal_(options.terminal) {
  if (terminal_) {
    pid_ = ::forkpty(&out_, nullptr, nullptr, nullptr);
    if (pid_ == 0) become(command, options);
    in_ = out_;
    ::fcntl(out_, F_SETFD, FD_CLOEXEC);
    return;
  }
  int input[2], output[2];
  if (::pipe2(input, O_CLOEXEC) != 0 || ::pipe2(output, O_CLOEXEC) != 0) std::abort();
  pid_ = ::fork();
  if (pid_ == 0) {
    ::setpgid(0, 0);
    ::dup2(input[0], STDIN_FILENO);
    ::dup2(output[1], STDOUT_FILENO);
    ::dup2(output[1], STDERR_FILENO);
    become(command, options);
  }
  ::setpgid(pid_, pid_);
  ::close(input[0]);
  ::close(output[1]);
  in_ = input[1];
  out_ = output[0];
}

Session::~Session() {
  if (pid_ > 0) {
    ::kill(-pid_, SIGKILL);
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  if (in_ >= 0 && in_ != out_) ::close(in_);
  ::close(out_);
}

void Session::type(const std::string& text) {
  if (::write(in_, text.data(), text.size()) != static_cast<ssize_t>(text.size())) std::abort();
}

void Session::send(int signal) {
  if (pid_ > 0) ::kill(pid_, signal);
}

void Session::close_input() {
  ::close(in_);
  in_ = -1;
}

bool Session::read_some(int milliseconds) {
  pollfd wait{out_, POLLIN, 0};
  if (::poll(&wait, 1, milliseconds) <= 0) return false;
  char bytes[4096];
  const auto got = ::read(out_, bytes, sizeof bytes);
  if (got > 0) output_.append(bytes, static_cast<std::size_t>(got));
  return got > 0;
}

bool Session::wait_for(const std::string& text, std::chrono::seconds limit) {
  const auto deadline = Clock::now() + limit;
  while (true) {
    const auto at = output_.find(text, found_);
    if (at != std::string::npos) {
      found_ = at + text.size();
      return true;
    }
    if (Clock::now() > deadline) return false;
    if (!read_some(50)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

int Session::wait(std::chrono::seconds limit) {
  const auto deadline = Clock::now() + limit;
  while (Clock::now() < deadline) {
    int status = 0;
    if (!read_some(10) && ::waitpid(pid_, &status, WNOHANG) == pid_) {
      while (read_some(0)) {
      }
      ::kill(-pid_, SIGKILL);
      pid_ = -1;
      return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
  }
  return -1;
}

std::string unique_marker() {
  unsigned number = 0;
  if (::getrandom(&number, sizeof number, 0) != sizeof number) std::abort();
  return "marker-" + std::to_string(number);
}

std::vector<pid_t> processes_with(const std::string& marker) {
  std::vector<pid_t> found;
  for (pid_t pid : all_processes())
    if (text_of("/proc/" + std::to_string(pid) + "/cmdline").find(marker) != std::string::npos)
      found.push_back(pid);
  return found;
}

pid_t child_named(pid_t parent, const std::string& name) {
  for (pid_t pid : all_processes()) {
    const auto stat = text_of("/proc/" + std::to_string(pid) + "/stat");  // "17 (name) S 16 ..."
    const auto open = stat.find('('), close = stat.rfind(')');
    if (close == std::string::npos || stat.substr(open + 1, close - open - 1) != name) continue;
    if (std::stoi(stat.substr(close + 4)) == parent) return pid;
  }
  return -1;
}

}  // namespace lockstep::testing

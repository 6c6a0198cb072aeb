#include "support/process.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

namespace lockstep::testing {
namespace {

using Clock = std::chrono::steady_clock;

struct Running {
  pid_t pid = -1;
  int out = -1;
};

Running start(const Program& program) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) std::abort();
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::setpgid(0, 0);
    ::dup2(ends[1], STDOUT_FILENO);
    ::dup2(ends[1], STDERR_FILENO);
    // What launched this test is none of the program's business.
    for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GTEST_OUTPUT"})
      ::unsetenv(name);
    for (const auto& [name, value] : program.environment) ::setenv(name.c_str(), value.c_str(), 1);
    std::vector<char*> arguments;
    for (const auto& argument : program.command) arguments.push_back(const_cast<char*>(argument.c_str()));
    arguments.push_back(nullptr);
    ::execvp(arguments[0], arguments.data());
    ::_exit(127);
  }
  ::close(ends[1]);
  return {pid, ends[0]};
}

}  // namespace

std::vector<Outcome> run_together(const std::vector<Program>& programs, std::chrono::seconds limit) {
  const auto begin = Clock::now();
  std::vector<Running> running;
  for (const auto& program : programs) running.push_back(start(program));
  std::vector<Outcome> outcomes(programs.size());
  std::size_t open = running.size();
  while (open > 0) {
    std::vector<pollfd> waits;
    for (const auto& each : running) waits.push_back({each.out, POLLIN, 0});
    if (Clock::now() - begin > limit)
      for (const auto& each : running) ::kill(-each.pid, SIGKILL);
    ::poll(waits.data(), waits.size(), 100);
    for (std::size_t i = 0; i < running.size(); ++i) {
      if (running[i].out < 0 || waits[i].revents == 0) continue;
      char buffer[4096];
      const auto got = ::read(running[i].out, buffer, sizeof buffer);
      if (got > 0) {
        outcomes[i].output.append(buffer, static_cast<std::size_t>(got));
        continue;
      }
      ::close(running[i].out);
      running[i].out = -1;
      int status = 0;
      ::waitpid(running[i].pid, &status, 0);
      outcomes[i].status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      outcomes[i].seconds = std::chrono::duration<double>(Clock::now() - begin).count();
      --open;
    }
  }
  return outcomes;
}

Outcome run(const Program& program, std::chrono::seconds limit) { return run_together({program}, limit)[0]; }

int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  if (::bind(fd, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0)
    std::abort();
  ::close(fd);
  return ntohs(address.sin_port);
}

}  // namespace lockstep::testing

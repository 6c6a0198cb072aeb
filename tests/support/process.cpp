#include "support/process.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <random>
#include <string>

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
    // Removes the variables of this test's own launcher.
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

namespace {

// Reserves the port for this process; true on success. tests/support/ports.py reserves with the same name.
// The reservation is an abstract unix socket, which ends with the process.
bool reserve(int port) {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = "lockstep-test-port-" + std::to_string(port);
  name.copy(address.sun_path + 1, sizeof address.sun_path - 1);
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (::bind(fd, reinterpret_cast<const sockaddr*>(&address), length) == 0) return true;
  ::close(fd);
  return false;
}

bool is_free(int port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  const bool bound = ::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  ::close(fd);
  return bound;
}

}  // namespace

int free_port() {
  std::random_device random;
  for (int tries = 0; tries < 10000; ++tries) {
    const int port = static_cast<int>(10000 + random() % 10000);  // SLURM jobs of the tests use ports above.
    if (reserve(port) && is_free(port)) return port;
  }
  std::abort();
}

}  // namespace lockstep::testing

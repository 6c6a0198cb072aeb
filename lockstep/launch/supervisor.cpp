#include <lockstep/launch/supervisor.h>

#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <system_error>

#include <fmt/format.h>
#include <lockstep/base/error.h>

namespace lockstep::detail {
namespace {

using Clock = std::chrono::steady_clock;

// Bound and listening before any rank starts, and inherited by rank 0: nobody can take the port meanwhile.
struct Listener {
  int fd = -1;
  int port = 0;

  Listener() {
    fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    if (fd < 0 || ::bind(fd, reinterpret_cast<sockaddr*>(&address), length) != 0 || ::listen(fd, 2048) != 0 ||
        ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0)
      throw std::system_error(errno, std::generic_category(), "no port of 127.0.0.1 could be opened");
    port = ntohs(address.sin_port);
  }
  ~Listener() { ::close(fd); }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
};

struct Rank {
  pid_t pid = -1;
  bool running = false;
};

std::string cause_of(const siginfo_t& info) {
  if (info.si_code == CLD_EXITED) return fmt::format("exit status {}", info.si_status);
  const char* name = ::sigabbrev_np(info.si_status);
  return fmt::format("signal {} (SIG{}){}", info.si_status, name ? name : "?",
                     info.si_code == CLD_DUMPED ? ", core dumped" : "");
}

int status_of(const siginfo_t& info) {
  return info.si_code == CLD_EXITED ? info.si_status : 128 + info.si_status;
}

// In the child, between fork and exec.
[[noreturn]] void become(const LaunchPlan& plan, int rank, const Listener& listener, int report,
                         pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);  // the parent ended before it could be watched
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  auto set = [](const char* name, const std::string& value) { ::setenv(name, value.c_str(), 1); };
  set("RANK", std::to_string(rank));
  set("LOCAL_RANK", std::to_string(rank));
  set("WORLD_SIZE", std::to_string(plan.num_ranks));
  set("LOCAL_WORLD_SIZE", std::to_string(plan.num_ranks));
  set("MASTER_ADDR", "127.0.0.1");
  set("MASTER_PORT", std::to_string(listener.port));
  const int threads = plan.threads > 0 ? plan.threads : std::max(1, available_cores() / plan.num_ranks);
  ::setenv("OMP_NUM_THREADS", std::to_string(threads).c_str(), plan.threads > 0);
  ::unsetenv("LOCKSTEP_LISTEN_FD");
  if (rank == 0) {
    set("LOCKSTEP_LISTEN_FD", std::to_string(listener.fd));
    ::fcntl(listener.fd, F_SETFD, 0);
  }
  std::vector<char*> arguments;
  for (const auto& argument : plan.command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  ::execvp(arguments[0], arguments.data());
  const int error = errno;
  [[maybe_unused]] auto written = ::write(report, &error, sizeof error);
  ::_exit(127);
}

class Job {
 public:
  explicit Job(const LaunchPlan& plan) : plan_(plan), ranks_(static_cast<std::size_t>(plan.num_ranks)) {
    ::sigemptyset(&signals_);
    for (int signal : {SIGCHLD, SIGINT, SIGTERM, SIGHUP}) ::sigaddset(&signals_, signal);
    ::sigprocmask(SIG_BLOCK, &signals_, &before_);
  }
  ~Job() {
    end_all(SIGKILL);
    for (const Rank& rank : ranks_)
      if (rank.running) ::waitpid(rank.pid, nullptr, 0);
    ::sigprocmask(SIG_SETMASK, &before_, nullptr);
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  void start() {
    Listener listener;
    int report[2];
    if (::pipe2(report, O_CLOEXEC) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
    const pid_t self = ::getpid();
    int fork_error = 0;
    for (int r = 0; r < plan_.num_ranks && fork_error == 0; ++r) {
      const pid_t pid = ::fork();
      if (pid == 0) become(plan_, r, listener, report[1], self);
      if (pid < 0)
        fork_error = errno;
      else
        ranks_[static_cast<std::size_t>(r)] = {pid, true};
    }
    ::close(report[1]);
    int exec_error = 0;  // the read ends when every rank has become the program, or one could not
    const auto got = fork_error == 0 ? ::read(report[0], &exec_error, sizeof exec_error) : 0;
    ::close(report[0]);
    if (fork_error != 0)
      throw std::system_error(fork_error, std::generic_category(), "a rank could not be started");
    if (got > 0)
      throw ConfigError(
          fmt::format("'{}' could not be started: {}", plan_.command[0], std::strerror(exec_error)));
  }

  int watch() {
    while (running_count() > 0) {
      const timespec tick{0, 100'000'000};
      const int signal = ::sigtimedwait(&signals_, nullptr, &tick);
      if (signal == SIGCHLD || signal < 0) reap();
      if (signal == SIGINT || signal == SIGTERM || signal == SIGHUP) {
        if (!status_) status_ = 128 + signal;
        end_all(signal);
        begin_end();
      }
      if (deadline_ && Clock::now() >= *deadline_) end_all(SIGKILL);
    }
    return status_.value_or(0);
  }

 private:
  int running_count() const {
    return static_cast<int>(
        std::count_if(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.running; }));
  }

  void end_all(int signal) {
    for (const Rank& rank : ranks_)
      if (rank.running) ::kill(rank.pid, signal);
  }

  void begin_end() {
    if (!deadline_) deadline_ = Clock::now() + plan_.grace;
  }

  void reap() {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      siginfo_t info{};
      if (!ranks_[r].running ||
          ::waitid(P_PID, static_cast<id_t>(ranks_[r].pid), &info, WEXITED | WNOHANG) != 0 ||
          info.si_pid == 0)
        continue;
      ranks_[r].running = false;
      const int status = status_of(info);
      if (status == 0 || status_) continue;  // those that end after the first failure were ended by us
      status_ = status;
      fmt::print(stderr, "lockstep: rank {} (pid {}) failed: {}; ending the other ranks\n", r, info.si_pid,
                 cause_of(info));
      end_all(SIGTERM);
      begin_end();
    }
  }

  const LaunchPlan& plan_;
  std::vector<Rank> ranks_;
  sigset_t signals_{}, before_{};
  std::optional<int> status_;
  std::optional<Clock::time_point> deadline_;
};

}  // namespace

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

int supervise(const LaunchPlan& plan) {
  if (plan.command.empty()) throw ConfigError("no program was given to start");
  if (plan.num_ranks < 1 || plan.num_ranks > 4096)
    throw ConfigError(
        fmt::format("{} ranks are not allowed on one host: from 1 to 4096 are", plan.num_ranks));
  Job job(plan);
  job.start();
  return job.watch();
}

}  // namespace lockstep::detail

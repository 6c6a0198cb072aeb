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
    // Away from the standard descriptors, which may be closed when the launcher starts.
    const int high = ::fcntl(fd, F_DUPFD_CLOEXEC, 64);
    if (high >= 0) {
      ::close(fd);
      fd = high;
    }
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
  // A group of its own: the terminal's Ctrl-C reaches it once, through us, and what it starts ends with it.
  ::setpgid(0, 0);
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
  // What another launcher around this one may have left.
  for (const char* name :
       {"LOCKSTEP_LISTEN_FD", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"})
    ::unsetenv(name);
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
    ::signal(SIGCHLD, SIG_DFL);  // a parent may ignore it, and then nobody can be waited for
    ::sigemptyset(&signals_);
    ::sigaddset(&signals_, SIGCHLD);
    // Under nohup and in the background some are ignored, and stay so: blocked, they would be taken all the
    // same.
    for (int signal : {SIGINT, SIGTERM, SIGHUP}) {
      struct sigaction current {};
      if (::sigaction(signal, nullptr, &current) == 0 && current.sa_handler != SIG_IGN)
        ::sigaddset(&signals_, signal);
    }
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
      siginfo_t info{};
      const int signal = ::sigtimedwait(&signals_, &info, &tick);
      // Several may have ended since; the signal is of the first.
      if (signal == SIGCHLD) reap_if(info.si_pid);
      if (signal == SIGCHLD || signal < 0) reap();
      if (signal == SIGINT || signal == SIGTERM || signal == SIGHUP) {
        if (!status_) status_ = 128 + signal;
        end_all(signalled_ ? SIGKILL : signal);
        signalled_ = true;
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
      if (rank.running) end_one(rank, signal);
  }

  // With what it started; itself, where it has not come as far as its own group.
  static void end_one(const Rank& rank, int signal) {
    if (::kill(-rank.pid, signal) != 0) ::kill(rank.pid, signal);
  }

  void begin_end() {
    if (!deadline_) deadline_ = Clock::now() + plan_.grace;
  }

  void reap() {
    for (const Rank& rank : ranks_) reap_if(rank.pid);
  }

  void reap_if(pid_t pid) {
    auto rank = std::find_if(ranks_.begin(), ranks_.end(), [&](const Rank& each) { return each.pid == pid; });
    siginfo_t info{};
    if (rank == ranks_.end() || !rank->running) return;
    if (::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG) == 0 && info.si_pid == 0) return;
    rank->running = false;
    ::kill(-pid, SIGKILL);  // what it leaves behind
    const int status = status_of(info);
    if (status == 0 || status_) return;  // those that end after the first failure were ended by us
    status_ = status;
    fmt::print(stderr, "lockstep: rank {} (pid {}) failed: {}; ending the other ranks\n",
               rank - ranks_.begin(), pid, cause_of(info));
    end_all(SIGTERM);
    begin_end();
  }

  const LaunchPlan& plan_;
  std::vector<Rank> ranks_;
  sigset_t signals_{}, before_{};
  std::optional<int> status_;
  bool signalled_ = false;
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

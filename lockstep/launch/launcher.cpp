#include <lockstep/launch/launcher.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <lockstep/base/start_thread.h>
#include <lockstep/control/agent/process.h>
#include <lockstep/control/wire/failure.h>
#include <lockstep/launch/agent_process.h>
#include <lockstep/launch/descendants.h>
#include <lockstep/launch/screen.h>
#include <lockstep/os/signals.h>

namespace lockstep::detail {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;
using control::Fd;
using std::chrono::milliseconds;

constexpr std::chrono::duration<int, std::milli> kLookAtStopped(100);

// Relays terminal input to a rank. Only the foreground process group may read a terminal, and each rank is in
// its own group, so the launcher reads and passes the input on. It stops reading while the rank does not
// consume it.
class TerminalRelay {
 public:
  explicit TerminalRelay(Fd to) : to_(std::move(to)) { ::fcntl(to_.get(), F_SETFL, O_NONBLOCK); }
  TerminalRelay() = default;

  void begin() { wanted_ = true; }

  pollfd wait() const {
    if (!to_ || !wanted_) return {-1, 0, 0};
    if (!held_.empty()) return {to_.get(), POLLOUT, 0};
    return {in_foreground() ? STDIN_FILENO : -1, POLLIN, 0};
  }
  // In the background the terminal must not be read, and no event reports a change, so it is polled.
  int patience() const { return to_ && wanted_ && held_.empty() && !in_foreground() ? 500 : -1; }

  void move() {
    if (held_.empty()) {
      std::array<char, 4096> bytes;
      const auto got = ::read(STDIN_FILENO, bytes.data(), bytes.size());
      if (got <= 0) {
        if (got == 0 || (errno != EINTR && errno != EAGAIN)) to_.reset();
        return;
      }
      held_.assign(bytes.data(), static_cast<std::size_t>(got));
    }
    const auto written = ::write(to_.get(), held_.data(), held_.size());
    if (written >= 0)
      held_.erase(0, static_cast<std::size_t>(written));
    else if (errno != EAGAIN && errno != EINTR)
      to_.reset();
  }

 private:
  static bool in_foreground() {
    const pid_t group = ::tcgetpgrp(STDIN_FILENO);
    // Below 0: the terminal is not this session's controlling terminal.
    return group < 0 || group == ::getpgrp();
  }

  Fd to_;
  bool wanted_ = false;  // True once a rank of this host reads the input.
  std::string held_;
};

class Launcher {
 public:
  explicit Launcher(const LaunchOptions& options) : stop_grace_(options.stop_grace) {
    ::signal(SIGCHLD, SIG_DFL);  // A parent may have ignored it, and then waitpid finds no child.
    // Opens closed standard descriptors; otherwise the first pipe would get their numbers.
    while (true) {
      const int fd = ::open("/dev/null", O_RDWR | O_CLOEXEC);
      if (fd < 0 || fd > STDERR_FILENO) {
        ::close(fd);
        break;
      }
      ::fcntl(fd, F_SETFD, 0);
    }
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    before_us_ = children(::getpid());  // Children of a shell that became this program by exec.

    Inherited inherited;
    ::pthread_sigmask(SIG_SETMASK, nullptr, &inherited.signals);
    signals_ = take_signals({SIGCHLD, SIGTSTP}, kForwarded);
    // Blocked, not ignored, because the ranks would inherit ignored signals: writing to a pipe without a
    // reader, to a terminal from the background, or beyond the file size limit.
    sigset_t harmless;
    ::sigemptyset(&harmless);
    for (int signal : {SIGPIPE, SIGTTOU, SIGXFSZ}) ::sigaddset(&harmless, signal);
    ::pthread_sigmask(SIG_BLOCK, &harmless, nullptr);
    int ends[2], typed[2] = {-1, -1};
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
      throw std::system_error(errno, std::generic_category(), "socketpair");
    channel_ = Fd(ends[0]);
    inherited.launcher = Fd(ends[1]);
    if (options.stdin_rank) {
      inherited.stdin_fd = STDIN_FILENO;
      if (::isatty(STDIN_FILENO) == 1 && ::pipe2(typed, O_CLOEXEC) == 0) inherited.stdin_fd = typed[0];
    }
    const pid_t pid = ::fork();
    if (pid < 0) throw not_created("the agent's process", errno);
    if (pid == 0) {
      channel_.reset();
      signals_.reset();
      if (typed[1] >= 0) ::close(typed[1]);
      ::_exit(guard(options, std::move(inherited)));
    }
    agent_process_ = pid;
    ::setpgid(pid, pid);
    if (typed[0] >= 0) {
      ::close(typed[0]);
      relay_ = TerminalRelay(Fd(typed[1]));
    }
  }

  int run() {
    while (true) {
      std::array<pollfd, 3> waits = {
          {{signals_.get(), POLLIN, 0}, relay_.wait(), {channel_.get(), POLLIN, 0}}};
      ::poll(waits.data(), waits.size(), stopped_since_ ? kLookAtStopped.count() : relay_.patience());
      if (waits[1].revents != 0) relay_.move();
      if (waits[2].revents != 0) listen();
      signalfd_siginfo info{};
      while (::read(signals_.get(), &info, sizeof info) == sizeof info) {
        const auto signal = static_cast<int>(info.ssi_signo);
        if (signal == SIGCHLD) {
          if (const auto status = reap()) return *status;
        } else if (signal == SIGTSTP) {
          stop_with_ranks();
        } else {
          send({Message::Kind::signal, signal});
          if (signal != SIGUSR1 && signal != SIGUSR2) make_sure_it_ends();
        }
      }
      check_agent_process();
    }
  }

 private:
  bool agent_process_is_stopped() const {
    const auto process = control::look_at(agent_process_);
    return process && process->state == 'T';
  }

  // A signal asks the job to end. The agent process must run for that; if it stays stopped, it is killed.
  void make_sure_it_ends() {
    const auto process = control::look_at(agent_process_);
    const bool held =
        process && (process->state == 'T' || process->state == 't');  // Stopped, or held by a debugger.
    if (num_stop_signals_++ == 0) {
      if (held) ::kill(agent_process_, SIGCONT);
    } else if (held) {
      kill_agent_process();
    }
  }

  void kill_agent_process() {
    killed_ = true;
    ::kill(agent_process_, SIGKILL);
  }

  // While the agent process is stopped (SIGSTOP), nothing else can end the job. It gets the same grace as a
  // rank. SIGCHLD reports when it stops.
  void check_agent_process() {
    if (killed_) return;  // Neither stopped nor running any more.
    const auto now = Clock::now(), before = std::exchange(looked_at_, now);
    if (!agent_process_is_stopped()) {
      if (stopped_since_)
        tell(fmt::format("lockstep: the agent (pid {}) resumed after {:.1f} s\n", agent_process_,
                         Seconds(now - *stopped_since_).count()));
      stopped_since_.reset();
      return;
    }
    if (!stopped_since_) {
      stopped_since_ = now;
      tell(
          fmt::format("lockstep: the agent (pid {}) is stopped (SIGSTOP): the job ends in {:.1f} s unless it "
                      "resumes\n",
                      agent_process_, Seconds(stop_grace_).count()));
    } else if (now - before > 5 * kLookAtStopped) {
      *stopped_since_ += now - before;  // This process was stopped too.
    }
    if (now - *stopped_since_ < stop_grace_) return;
    why_killed_ = fmt::format("was stopped (SIGSTOP) for {:.1f} s, longer than --stop-grace allows",
                              Seconds(now - *stopped_since_).count());
    kill_agent_process();
  }

  // Skips the line if standard error is not writable: waiting for its reader would delay the end of the job.
  static void tell(const std::string& line) {
    pollfd out{STDERR_FILENO, POLLOUT, 0};
    if (::poll(&out, 1, 0) > 0) write_all(STDERR_FILENO, line);
  }

  // Reads a message from the agent process; nothing if it has ended, which SIGCHLD reports too.
  std::optional<Message::Kind> listen() {
    Message message;
    const auto got = ::recv(channel_.get(), &message, sizeof message, MSG_DONTWAIT);
    if (got != sizeof message) {
      if (got == 0 || (errno != EAGAIN && errno != EINTR)) channel_.reset();
      return std::nullopt;
    }
    if (message.kind == Message::Kind::input) relay_.begin();
    return message.kind;
  }

  void send(Message message) {
    // A stopped agent process does not read; the message is dropped if its buffer is full.
    ::send(channel_.get(), &message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  // Ctrl-Z: stops the ranks first, then this process, as its parent expects. Continuing this process
  // continues them.
  void stop_with_ranks() {
    send({Message::Kind::pause});
    for (pollfd answer{channel_.get(), POLLIN, 0}; ::poll(&answer, 1, 2000) > 0;) {
      const auto kind = listen();
      if (!kind || kind == Message::Kind::paused) break;
    }
    ::raise(SIGTSTP);
    sigset_t stop;
    ::sigemptyset(&stop);
    ::sigaddset(&stop, SIGTSTP);
    ::pthread_sigmask(SIG_UNBLOCK, &stop, nullptr);  // Stops here.
    ::pthread_sigmask(SIG_BLOCK, &stop, nullptr);
    send({Message::Kind::resume});
  }

  // Returns the job's status once the agent process has ended. As a container's first process, this also
  // reaps orphans.
  std::optional<int> reap() {
    std::optional<siginfo_t> end;
    for (siginfo_t info{}; ::waitid(P_ALL, 0, &info, WEXITED | WNOHANG) == 0 && info.si_pid != 0; info = {})
      if (info.si_pid == agent_process_) end = info;
    if (!end) return std::nullopt;
    if (end->si_code == CLD_EXITED) return end->si_status;
    control::Ended how;
    how.signal = end->si_status;
    // Ends the descendants before writing the line, which may fail, so that no rank is left behind.
    end_descendants(
        milliseconds(10000),
        [] {
          while (::waitpid(-1, nullptr, WNOHANG) > 0) {
          }
        },
        before_us_);
    write_all(STDERR_FILENO, fmt::format("lockstep: the agent (pid {}) {}; the ranks were terminated\n",
                                         agent_process_, why_killed_.empty() ? how.text() : why_killed_));
    return 128 + end->si_status;
  }

  const milliseconds stop_grace_;
  std::vector<pid_t> before_us_;
  Fd signals_, channel_;
  TerminalRelay relay_;
  pid_t agent_process_ = -1;
  int num_stop_signals_ = 0;
  std::optional<Clock::time_point> stopped_since_;  // Since when the agent process has been stopped.
  Clock::time_point looked_at_ = Clock::now();
  bool killed_ = false;     // True once this process has killed the agent process.
  std::string why_killed_;  // Why it did; empty without a reason to report.
};

}  // namespace

int launch(const LaunchOptions& options) {
  check_proc();
  return Launcher(options).run();
}

}  // namespace lockstep::detail

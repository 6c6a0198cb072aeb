#include <lockstep/launch/guardian.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <system_error>
#include <variant>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/control/agent.h>
#include <lockstep/launch/descendants.h>
#include <lockstep/launch/network.h>
#include <lockstep/launch/out_of_memory.h>
#include <lockstep/launch/output.h>
#include <lockstep/launch/placement.h>
#include <lockstep/launch/rank_process.h>
#include <lockstep/launch/signals.h>

namespace lockstep::detail {
namespace {

using Clock = std::chrono::steady_clock;
using control::Fd;
using std::chrono::milliseconds;

// For ranks that were told of a failure to end by themselves, with their own last words.
constexpr milliseconds kAfterVerdict{1000};
// For a process that was killed; one that is inside the kernel may take longer, and is not waited for.
constexpr milliseconds kAfterKill{10000};

template <typename... Ts>
struct Overloaded : Ts... {
  using Ts::operator()...;
};

std::string random_name() {
  std::array<unsigned char, 16> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    throw std::system_error(errno, std::generic_category(), "getrandom");
  std::string name = "lockstep/";
  for (unsigned char byte : bytes) name += fmt::format("{:02x}", byte);
  return name;
}

std::pair<Fd, Fd> make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0)
    throw std::system_error(errno, std::generic_category(), "a pipe could not be made");
  return {Fd(ends[0]), Fd(ends[1])};
}

// Two pipes and a connection for each rank are more than many systems allow by default. Returns the limit
// that the ranks are to have.
rlim_t allow_open_files(int num_ranks) {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const rlim_t before = limit.rlim_cur;
  limit.rlim_cur =
      std::min(limit.rlim_max, std::max<rlim_t>(before, 256 + 4 * static_cast<rlim_t>(num_ranks)));
  ::setrlimit(RLIMIT_NOFILE, &limit);
  return before;
}

control::Ended ended(const siginfo_t& info) {
  control::Ended how;
  how.pid = info.si_pid;
  if (info.si_code == CLD_EXITED)
    how.status = info.si_status;
  else
    how.signal = info.si_status;
  how.core = info.si_code == CLD_DUMPED;
  return how;
}

// Also of what a shell ran that is the rank: it passes the signal on as a status.
bool is_kill(const control::Ended& how) { return how.signal == SIGKILL || how.status == 128 + SIGKILL; }

class Guardian {
 public:
  Guardian(const LaunchPlan& plan, Inherited& inherited)
      : plan_(plan),
        launcher_(inherited.launcher.get()),
        stdin_fd_(inherited.stdin_fd),
        rank_signals_(inherited.signals),
        program_(find_program(plan)),
        placement_(place_ranks(plan)),
        rank_open_files_(allow_open_files(plan.num_ranks)),
        null_(::open("/dev/null", O_RDWR | O_CLOEXEC)),
        signals_(take_signals({SIGCHLD}, kForwarded)),
        output_(plan),
        agent_(agent_options()) {}

  int run() {
    if (!plan_.quiet && !agent_.address().empty())
      say(fmt::format("node {} of {}, meeting the others at {}", plan_.node, plan_.num_nodes,
                      agent_.address()));
    while (!status_) {
      wait(agent_.orders_fd());
      if (launcher_gone_) return 128 + SIGKILL;
      for (auto& order : agent_.take_orders()) std::visit([this](auto& what) { handle(what); }, order);
      keep_deadlines();
      if (started_ && running() == 0) {
        end_leftovers();
        agent_.node_done();
      }
    }
    if (started_) end_leftovers();
    output_.finish();
    // However slow the reader is, unless the person has had enough.
    for (const int before = num_signals_; !output_is_done_ && num_signals_ == before && !launcher_gone_;)
      wait(output_.done_fd(), &output_is_done_);
    return *status_;
  }

  bool has_shown_everything() const { return output_is_done_; }

 private:
  struct Rank {
    pid_t pid = -1;
    bool running = false;
    bool killed = false;  // by us
  };

  control::AgentOptions agent_options() {
    control::AgentOptions options;
    options.name = agent_name_ = random_name();
    options.node = plan_.node;
    options.num_nodes = plan_.num_nodes;
    options.local_ranks = plan_.num_ranks;
    options.max_restarts = plan_.max_restarts;
    options.head = plan_.node == 0;
    options.stop_grace = plan_.stop_grace;
    if (plan_.join_timeout) options.join_timeout = *plan_.join_timeout;
    if (plan_.num_nodes > 1)
      options.link =
          control::Link{plan_.master_address, plan_.master_port, plan_.master_port, plan_.key, plan_.job};
    options.say = [this](const std::string& line) { say(line); };
    // It may see that a large rank is ending before the kernel has put its memory away and tells us.
    options.explain = [this](const control::Ended& how) { return explain(how); };
    return options;
  }

  void say(const std::string& line) { output_.say("lockstep: " + line); }

  // Until something has happened, or a deadline is there.
  void wait(int fd, bool* fd_is_ready = nullptr) {
    std::array<pollfd, 4> waits = {{{launcher_, POLLIN, 0},
                                    {signals_.get(), POLLIN, 0},
                                    {fd, POLLIN, 0},
                                    {exec_errors_.get(), POLLIN, 0}}};
    auto next = Clock::now() + std::chrono::hours(1);
    for (const auto& deadline : {terminate_at_, kill_at_, give_up_at_})
      if (deadline) next = std::min(next, *deadline);
    const auto left = std::chrono::ceil<milliseconds>(next - Clock::now()).count();
    ::poll(waits.data(), waits.size(), static_cast<int>(std::max<std::int64_t>(0, left)));
    if (waits[0].revents != 0) listen_to_launcher();
    if (waits[3].revents != 0) check_start();
    if (waits[1].revents != 0) read_signals();
    if (fd_is_ready != nullptr && waits[2].revents != 0) *fd_is_ready = true;
  }

  void listen_to_launcher() {
    Message message;
    const auto got = ::recv(launcher_, &message, sizeof message, MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
      launcher_gone_ = true;
    } else if (got == sizeof message) {
      if (message.kind == Message::Kind::signal) take_signal(message.signal);
      if (message.kind == Message::Kind::pause) pause();
      if (message.kind == Message::Kind::resume) resume();
    }
  }

  void tell_launcher(Message::Kind kind) {
    const Message message{kind};
    ::send(launcher_, &message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  void read_signals() {
    signalfd_siginfo info{};
    while (::read(signals_.get(), &info, sizeof info) == sizeof info) {
      const auto signal = static_cast<int>(info.ssi_signo);
      if (signal == SIGCHLD)
        reap();
      else
        take_signal(signal);
    }
  }

  // ---- what the person wants ------------------------------------------------------------------------------

  void take_signal(int signal) {
    if (signal == SIGUSR1 || signal == SIGUSR2) return send_all(signal);
    if (num_signals_++ == 0) return agent_.stop(signal);
    kill_all();
    if (!started_) status_ = 128 + signal;  // other hosts may not be there to agree
  }

  void pause() {
    agent_.paused(true);
    send_all(SIGSTOP);
    tell_launcher(Message::Kind::paused);
  }

  void resume() {
    send_all(SIGCONT);
    agent_.paused(false);
  }

  // ---- what the agent wants -------------------------------------------------------------------------------

  void handle(const control::Start& start) {
    output_.begin_attempt(start.attempt, start.world_size);
    if (start.attempt == 0 && !plan_.quiet) say(start_line(start));
    ranks_.assign(static_cast<std::size_t>(plan_.num_ranks), {});
    first_rank_ = start.first_rank;
    terminate_at_ = kill_at_ = give_up_at_ = std::nullopt;
    memory_.begin();
    started_ = true;
    auto [errors, report] = make_pipe();
    ::fcntl(errors.get(), F_SETFL, O_NONBLOCK);
    exec_errors_ = std::move(errors);
    RankPlace place;
    place.world_size = start.world_size;
    place.attempt = start.attempt;
    place.master_address = start.address;
    place.master_port = plan_.num_nodes > 1 ? port_beside(plan_.master_port) : free_port();
    place.threads = placement_.threads;
    place.agent = agent_name_;
    for (int local = 0; local < plan_.num_ranks; ++local) {
      place.local_rank = local;
      place.rank = first_rank_ + local;
      start_one(place, report.get());
    }
  }

  void start_one(const RankPlace& place, int report) {
    RankProcess process;
    process.file = program_;
    process.arguments = plan_.command;
    process.environment = rank_environment(plan_, place);
    process.directory = plan_.directory;
    if (!placement_.masks.empty())
      process.mask = placement_.masks[static_cast<std::size_t>(place.local_rank)];
    auto [out, out_end] = make_pipe();
    auto [err, err_end] = make_pipe();
    const bool reads = plan_.stdin_rank == place.rank && stdin_fd_ >= 0;
    process.in = reads ? stdin_fd_ : null_.get();
    if (reads) tell_launcher(Message::Kind::input);
    process.out = out_end.get();
    process.err = err_end.get();
    process.report = report;
    process.open_files = rank_open_files_;
    process.signals = rank_signals_;
    output_.add_rank(place.rank, std::move(out), std::move(err));
    const pid_t pid = start_rank(process);
    ranks_[static_cast<std::size_t>(place.local_rank)] = {pid, true, false};
    agent_.rank_started(place.rank, pid);
  }

  std::string start_line(const control::Start& start) const {
    auto plural = [](int count, const char* what) {
      return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
    };
    std::string ranks = plural(plan_.num_ranks, "rank") + " on this host";
    if (plan_.num_nodes > 1)
      ranks = fmt::format("node {} of {}, ranks {} to {} of {}", plan_.node, plan_.num_nodes,
                          start.first_rank, start.first_rank + plan_.num_ranks - 1, start.world_size);
    return fmt::format("{}, {} each, {}", ranks, plural(placement_.threads, "thread"), placement_.text);
  }

  void handle(const control::Stop& stop) {
    for (const Rank& rank : ranks_)
      if (rank.running) {
        send(rank, stop.signal);
        if (is_stopped(rank)) send(rank, SIGCONT);
      }
    if (!kill_at_) kill_at_ = Clock::now() + plan_.grace;
  }

  void handle(const control::Failed& failed) {
    const auto local = static_cast<std::size_t>(failed.failure.rank - first_rank_);
    if (failed.failure.rank < 0 || local >= ranks_.size() || !ranks_[local].killed)
      output_.tell_failure("lockstep: " + failed.failure.text(), failed.failure.rank);
    if (!terminate_at_) terminate_at_ = Clock::now() + kAfterVerdict;
    for (const Rank& rank : ranks_)
      if (rank.running && is_stopped(rank)) send(rank, SIGKILL);
  }

  void handle(const control::Finish& finish) {
    std::string_view why = finish.why;
    while (!why.empty()) {
      const auto end = std::min(why.find('\n'), why.size());
      say(std::string(why.substr(0, end)));
      why.remove_prefix(std::min(end + 1, why.size()));
    }
    status_ = finish.status;
  }

  // ---- the ranks ------------------------------------------------------------------------------------------

  void check_start() {
    int error = 0;
    const auto got = ::read(exec_errors_.get(), &error, sizeof error);
    if (got < 0 && errno == EAGAIN) return;
    exec_errors_.reset();  // every rank has become the program, or one could not
    if (got > 0)
      throw ConfigError(fmt::format("'{}' could not be started: {}", plan_.command[0], std::strerror(error)));
  }

  // Also for those that others have left to us.
  void reap() {
    if (exec_errors_) check_start();
    for (siginfo_t info{}; ::waitid(P_ALL, 0, &info, WEXITED | WNOHANG) == 0 && info.si_pid != 0; info = {}) {
      const auto rank = std::find_if(ranks_.begin(), ranks_.end(), [&](const Rank& each) {
        return each.running && each.pid == info.si_pid;
      });
      if (rank == ranks_.end()) continue;
      rank->running = false;
      auto how = ended(info);
      how.note = explain(how);
      agent_.rank_ended(first_rank_ + static_cast<int>(rank - ranks_.begin()), how);
    }
  }

  std::string explain(const control::Ended& how) const { return is_kill(how) ? memory_.note() : ""; }

  void end_leftovers() {
    started_ = false;
    for (pid_t pid : end_descendants(kAfterKill, [this] { reap(); }))
      say(fmt::format("process {} could not be ended", pid));
    output_.ranks_are_gone();
    terminate_at_ = kill_at_ = give_up_at_ = std::nullopt;
  }

  void keep_deadlines() {
    const auto now = Clock::now();
    if (terminate_at_ && now >= *terminate_at_) {
      terminate_at_.reset();
      send_all(SIGTERM);
      if (!kill_at_) kill_at_ = now + plan_.grace;
    }
    if (kill_at_ && now >= *kill_at_) {
      for (std::size_t i = 0; i < ranks_.size(); ++i)
        if (ranks_[i].running)
          say(fmt::format("rank {} (pid {}) has not ended within {} s: it is killed",
                          first_rank_ + static_cast<int>(i), ranks_[i].pid,
                          static_cast<double>(plan_.grace.count()) / 1000));
      kill_all();
    }
    if (give_up_at_ && now >= *give_up_at_) give_up();
  }

  void kill_all() {
    kill_at_.reset();
    for (Rank& rank : ranks_)
      if (rank.running) {
        rank.killed = true;
        send(rank, SIGKILL);
      }
    if (!give_up_at_) give_up_at_ = Clock::now() + kAfterKill;
  }

  // Those that do not even end when killed are inside the kernel: a file system or a device hangs.
  void give_up() {
    give_up_at_.reset();
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      if (!ranks_[i].running) continue;
      ranks_[i].running = false;
      control::Ended how;
      how.pid = ranks_[i].pid;
      how.note = "it does not react to SIGKILL";
      say(fmt::format("rank {} (pid {}) does not react to SIGKILL: a device or a file system hangs",
                      first_rank_ + static_cast<int>(i), ranks_[i].pid));
      agent_.rank_ended(first_rank_ + static_cast<int>(i), how);
    }
  }

  int running() const {
    return static_cast<int>(
        std::count_if(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.running; }));
  }

  void send_all(int signal) {
    for (const Rank& rank : ranks_)
      if (rank.running) send(rank, signal);
  }

  // With what it started, as far as that has not left its group.
  static void send(const Rank& rank, int signal) { ::kill(-rank.pid, signal); }

  static bool is_stopped(const Rank& rank) {
    const auto state = process_state(rank.pid);
    return state && state->state == 'T';
  }

  const LaunchPlan& plan_;
  const int launcher_, stdin_fd_;
  const sigset_t rank_signals_;
  const std::string program_;
  const Placement placement_;
  const rlim_t rank_open_files_;
  const Fd null_;
  const Fd signals_;
  std::string agent_name_;
  Fd exec_errors_;
  OutOfMemory memory_;
  Output output_;
  control::Agent agent_;  // after the output: it says things until it ends

  std::vector<Rank> ranks_;
  int first_rank_ = 0;
  bool started_ = false;  // ranks were started, and their end has not been told
  std::optional<Clock::time_point> terminate_at_, kill_at_, give_up_at_;
  int num_signals_ = 0;
  bool launcher_gone_ = false, output_is_done_ = false;
  std::optional<int> status_;
};

void end_all() {
  end_descendants(kAfterKill, [] {
    while (::waitpid(-1, nullptr, WNOHANG) > 0) {
    }
  });
}

}  // namespace

int guard(const LaunchPlan& plan, Inherited inherited) {
  ::prctl(PR_SET_NAME, "lockstep-agent");
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  ::setpgid(0, 0);
  try {
    // Never destroyed when it is left early: its threads may be held by a terminal that does not read.
    auto* guardian = new Guardian(plan, inherited);
    const int status = guardian->run();
    if (guardian->has_shown_everything())
      delete guardian;
    else
      end_all();
    return status;
  } catch (const std::exception& error) {
    end_all();
    fmt::print(stderr, "lockstep: {}\n", error.what());
    return 2;
  }
}

}  // namespace lockstep::detail

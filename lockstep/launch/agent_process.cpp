#include <lockstep/base/text.h>
#include <lockstep/launch/agent_process.h>

#include <poll.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <optional>
#include <system_error>
#include <variant>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/control/agent/agent.h>
#include <lockstep/control/board/flight.h>
#include <lockstep/launch/descendants.h>
#include <lockstep/launch/flight/flight_keeper.h>
#include <lockstep/launch/local_ranks.h>
#include <lockstep/launch/out_of_memory.h>
#include <lockstep/launch/output.h>
#include <lockstep/launch/screen.h>
#include <lockstep/launch/status_line.h>
#include <lockstep/os/signals.h>

namespace lockstep::detail {
namespace {

using Clock = std::chrono::steady_clock;
using control::Fd;
using std::chrono::milliseconds;

// Time for ranks notified of a failure to end by themselves and print their own errors.
constexpr milliseconds kAfterVerdict{1000};
// Time for a killed process to end; a process blocked inside the kernel may take longer and is not waited
// for.
constexpr milliseconds kAfterKill{10000};

std::string random_name() {
  std::array<unsigned char, 16> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    throw std::system_error(errno, std::generic_category(), "getrandom");
  std::string name = "lockstep/";
  for (unsigned char byte : bytes) name += fmt::format("{:02x}", byte);
  return name;
}

class AgentProcess {
 public:
  AgentProcess(const LaunchOptions& options, const Inherited& inherited)
      : options_(options),
        launcher_(inherited.launcher.get()),
        ranks_(options, inherited.stdin_fd, inherited.signals),
        signals_(take_signals({SIGCHLD}, kForwarded)),
        output_(options),
        flights_(options),
        agent_(agent_options()) {}

  int run() {
    if (!options_.quiet && !agent_.address().empty())
      say(fmt::format("node {} of {}, coordinator at {}", options_.node, options_.num_nodes,
                      agent_.address()));
    while (!status_) {
      wait(paused_since_ ? -1 : agent_.orders_fd());
      if (launcher_gone_) {
        agent_.leave_hosts();
        return 128 + SIGKILL;
      }
      if (paused_since_) continue;  // Orders and deadlines wait while the ranks are paused.
      for (auto& order : agent_.take_orders()) std::visit([this](auto& what) { handle(what); }, order);
      keep_deadlines();
      if (started_ && ranks_.running().empty()) {
        end_leftovers();
        agent_.node_done();
      }
    }
    if (started_) end_leftovers();
    output_.finish();
    // Waits for a slow reader, unless the user has sent a signal.
    if (num_signals_ > 0) give_up_at_ = Clock::now() + options_.grace;
    const int before = num_signals_;
    while (!output_is_done_ && num_signals_ == before && !launcher_gone_ &&
           !(give_up_at_ && Clock::now() >= *give_up_at_))
      output_is_done_ = wait(output_.done_fd());
    // A job whose output was lost has not fully succeeded.
    return *status_ == 0 && output_is_done_ && output_.has_lost() ? 1 : *status_;
  }

  bool has_shown_everything() const { return output_is_done_; }

 private:
  control::AgentOptions agent_options() {
    control::AgentOptions options;
    options.name = agent_name_ = random_name();
    options.node = options_.node;
    options.num_nodes = options_.num_nodes;
    options.local_ranks = options_.num_ranks;
    options.max_restarts = options_.max_restarts;
    options.coordinator = options_.node == 0;
    options.stop_grace = options_.stop_grace;
    if (options_.join_timeout) options.join_timeout = *options_.join_timeout;
    if (options_.num_nodes > 1)
      options.link = control::Link{options_.master_address, options_.master_port, options_.master_port,
                                   options_.key, options_.job};
    options.say = [this](const std::string& line) { say(line); };
    // The agent may notice the end of a large rank before the kernel has freed its memory and sent SIGCHLD.
    options.explain = [this](const control::Ended& how) { return explain(how); };
    options.flight = [this](control::FlightRecord record) { flights_.take(std::move(record)); };
    if (options_.status != StatusLine::never)
      options.status = [this](const control::Status& status) { output_.show_status(status_text(status)); };
    return options;
  }

  void save_flight() {
    if (const auto line = flights_.save()) say(*line);
  }

  void say(const std::string& line) { output_.say("lockstep: " + line); }

  // Waits for an event or a deadline. Returns true if fd became readable.
  bool wait(int fd) {
    std::array<pollfd, 4> waits = {{{launcher_, POLLIN, 0},
                                    {signals_.get(), POLLIN, 0},
                                    {fd, POLLIN, 0},
                                    {ranks_.start_fd(), POLLIN, 0}}};
    auto next = Clock::now() + std::chrono::hours(1);
    if (!paused_since_)
      for (const auto& deadline : {terminate_at_, kill_at_, give_up_at_})
        if (deadline) next = std::min(next, *deadline);
    const auto left = std::chrono::ceil<milliseconds>(next - Clock::now()).count();
    ::poll(waits.data(), waits.size(), static_cast<int>(std::max<std::int64_t>(0, left)));
    if (waits[0].revents != 0) listen_to_launcher();
    if (waits[3].revents != 0) ranks_.check_start();
    if (waits[1].revents != 0) read_signals();
    return waits[2].revents != 0;
  }

  // ---- requests of the launcher ---------------------------------------------------------------------------

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

  void take_signal(int signal) {
    if (signal == SIGUSR1 || signal == SIGUSR2) return ranks_.send(signal);
    resume();  // Ranks must run in order to end.
    if (num_signals_++ == 0) return agent_.stop(signal);
    kill_all();
    if (!started_) status_ = 128 + signal;  // Other hosts may not have joined yet, so they cannot agree.
  }

  void pause() {
    if (!paused_since_) paused_since_ = Clock::now();
    agent_.paused(true);
    output_.hold_status(true);
    ranks_.send(SIGSTOP);
    tell_launcher(Message::Kind::paused);
  }

  void resume() {
    if (!paused_since_) return;
    for (auto* deadline : {&terminate_at_, &kill_at_, &give_up_at_})
      if (*deadline) **deadline += Clock::now() - *paused_since_;
    paused_since_.reset();
    ranks_.send(SIGCONT);
    agent_.paused(false);
    output_.hold_status(false);
  }

  // ---- orders of the agent --------------------------------------------------------------------------------

  void handle(const control::Start& start) {
    save_flight();  // Of the previous attempt.
    output_.begin_attempt(start.attempt, start.world_size);
    if (start.attempt == 0 && !options_.quiet) say(start_line(start));
    terminate_at_ = kill_at_ = give_up_at_ = std::nullopt;
    memory_.begin();
    started_ = true;
    ranks_.start(start, agent_name_, output_,
                 [this](const LocalRanks::Rank& rank) { agent_.rank_started(rank.number, rank.pid); });
    if (ranks_.reads_input()) tell_launcher(Message::Kind::input);
  }

  std::string start_line(const control::Start& start) const {
    std::string ranks = counted(options_.num_ranks, "rank") + " on this host";
    if (options_.num_nodes > 1)
      ranks = fmt::format("node {} of {}, ranks {} to {} of {}", options_.node, options_.num_nodes,
                          start.first_rank, start.first_rank + options_.num_ranks - 1, start.world_size);
    const Placement& placement = ranks_.placement();
    return fmt::format("{}, {} each, {}", ranks, counted(placement.threads, "thread"), placement.text);
  }

  void handle(const control::Stop& stop) {
    ranks_.wake_for(stop.signal);
    if (!kill_at_) kill_at_ = Clock::now() + options_.grace;
  }

  void handle(const control::Failed& failed) {
    // The failure of a rank that this process killed has already been reported.
    if (!ranks_.was_killed(failed.failure.rank))
      output_.tell_failure("lockstep: " + failed.failure.text(), failed.failure.rank);
    failed_rank_ = failed.failure.rank;
    if (!terminate_at_) terminate_at_ = Clock::now() + kAfterVerdict;
    ranks_.kill_stopped();
  }

  void handle(const control::Finish& finish) {
    save_flight();
    std::string_view why = finish.why;
    while (!why.empty()) {
      const auto end = std::min(why.find('\n'), why.size());
      say(std::string(why.substr(0, end)));
      why.remove_prefix(std::min(end + 1, why.size()));
    }
    status_ = finish.status;
  }

  // ---- end of the ranks -----------------------------------------------------------------------------------

  void reap() {
    ranks_.reap([this](const LocalRanks::Rank& rank, control::Ended how) {
      how.note = explain(how);
      if (how.signal == SIGABRT) aborted_.push_back(rank.number);
      agent_.rank_ended(rank.number, how);
    });
  }

  std::string explain(const control::Ended& how) const {
    // A rank that is a shell reports the signal that ended its child as a status.
    const bool was_killed = how.signal == SIGKILL || how.status == 128 + SIGKILL;
    return was_killed ? memory_.note() : "";
  }

  void keep_deadlines() {
    const auto now = Clock::now();
    if (terminate_at_ && now >= *terminate_at_) {
      terminate_at_.reset();
      ranks_.send(SIGTERM);
      if (!kill_at_) kill_at_ = now + options_.grace;
    }
    if (kill_at_ && now >= *kill_at_) {
      for (const auto& rank : ranks_.running())
        say(fmt::format("rank {} (pid {}) did not end within {} s; killing it", rank.number, rank.pid,
                        static_cast<double>(options_.grace.count()) / 1000));
      kill_all();
    }
    if (give_up_at_ && now >= *give_up_at_) give_up();
  }

  void kill_all() {
    kill_at_.reset();
    ranks_.kill();
    if (!give_up_at_) give_up_at_ = Clock::now() + kAfterKill;
  }

  // Processes that do not end even when killed are blocked inside the kernel: a file system or a device
  // hangs.
  void give_up() {
    give_up_at_.reset();
    for (const auto& rank : ranks_.give_up()) {
      control::Ended how;
      how.pid = rank.pid;
      how.note = "it does not respond to SIGKILL";
      say(fmt::format("rank {} (pid {}) does not respond to SIGKILL: a device or a file system hangs",
                      rank.number, rank.pid));
      agent_.rank_ended(rank.number, how);
    }
  }

  void end_leftovers() {
    started_ = false;
    for (pid_t pid : end_descendants(kAfterKill, [this] { reap(); }))
      say(fmt::format("cannot end process {}", pid));
    // These exceptions follow from the failure that was shown, or repeat it.
    std::erase(aborted_, failed_rank_.value_or(-1));
    std::sort(aborted_.begin(), aborted_.end());
    if (failed_rank_ && !aborted_.empty())
      say(fmt::format("{} then ended with an exception: {}", counted(aborted_.size(), "rank"),
                      fmt::join(aborted_, ", ")));
    failed_rank_.reset();
    aborted_.clear();
    output_.ranks_are_gone();
    terminate_at_ = kill_at_ = give_up_at_ = std::nullopt;
  }

  const LaunchOptions& options_;
  const int launcher_;
  LocalRanks ranks_;
  const Fd signals_;  // Created before any thread.
  std::string agent_name_;
  OutOfMemory memory_;
  Output output_;
  FlightKeeper flights_;
  control::Agent agent_;  // Destroyed before output_, because it logs until it ends.

  bool started_ = false;  // True while ranks have been started and their end has not been reported.
  std::optional<Clock::time_point> terminate_at_, kill_at_, give_up_at_;
  std::optional<Clock::time_point> paused_since_;  // Ctrl-Z
  int num_signals_ = 0;
  std::optional<int> failed_rank_;  // Rank of the job's failure, once known; -1 if no rank failed.
  std::vector<int> aborted_;        // Ranks of this host that ended with SIGABRT.
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

int guard(const LaunchOptions& options, Inherited inherited) {
  ::prctl(PR_SET_NAME, "lockstep-agent");
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  // The channel's end reports that the launcher has ended, unless this process is stopped: SIGCONT resumes
  // it.
  ::prctl(PR_SET_PDEATHSIG, SIGCONT);
  ::setpgid(0, 0);
  try {
    // Leaked if its output is not done: its threads may be blocked by a terminal that does not read.
    auto* agent_process = new AgentProcess(options, inherited);
    const int status = agent_process->run();
    if (agent_process->has_shown_everything())
      delete agent_process;
    else
      end_all();
    return status;
  } catch (const std::exception& error) {
    end_all();
    write_all(STDERR_FILENO, fmt::format("lockstep: {}\n", error.what()));
    return 2;
  }
}

}  // namespace lockstep::detail

#include <lockstep/launch/local_ranks.h>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/control/agent/process.h>
#include <lockstep/launch/descendants.h>
#include <lockstep/launch/network.h>

namespace lockstep::detail {
namespace {

using control::Fd;

std::pair<Fd, Fd> make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0)
    throw std::system_error(errno, std::generic_category(), "cannot create a pipe");
  return {Fd(ends[0]), Fd(ends[1])};
}

// Two pipes and a connection per rank exceed many systems' default limit. Returns the original limit, which
// the ranks get.
rlim_t allow_open_files(int num_ranks) {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const rlim_t before = limit.rlim_cur;
  const rlim_t needed = 256 + 4 * static_cast<rlim_t>(num_ranks);
  limit.rlim_cur = std::min(limit.rlim_max, std::max(before, needed));
  ::setrlimit(RLIMIT_NOFILE, &limit);
  return before;
}

control::Ended how_it_ended(const siginfo_t& info) {
  control::Ended how;
  how.pid = info.si_pid;
  if (info.si_code == CLD_EXITED)
    how.status = info.si_status;
  else
    how.signal = info.si_status;
  how.core = info.si_code == CLD_DUMPED;
  return how;
}

// Signals the rank and its process group, which may not exist yet if the rank has just been started.
void send_to(const LocalRanks::Rank& rank, int signal) {
  if (::getpgid(rank.pid) != rank.pid) ::kill(rank.pid, signal);
  ::kill(-rank.pid, signal);
}

bool is_stopped(const LocalRanks::Rank& rank) {
  const auto state = control::look_at(rank.pid);
  return state && state->state == 'T';
}

}  // namespace

LocalRanks::LocalRanks(const LaunchOptions& options, int stdin_fd, const sigset_t& signals)
    : options_(options),
      stdin_fd_(stdin_fd),
      signals_(signals),
      program_(find_program(options)),
      placement_(place_ranks(options)),
      open_files_(allow_open_files(options.num_ranks)),
      null_(::open("/dev/null", O_RDWR | O_CLOEXEC)) {}

void LocalRanks::start(const control::Start& start, const std::string& agent, Output& output,
                       const Started& started) {
  ranks_.clear();
  auto [errors, report] = make_pipe();
  ::fcntl(errors.get(), F_SETFL, O_NONBLOCK);
  exec_errors_ = std::move(errors);
  RankPlace place;
  place.world_size = start.world_size;
  place.attempt = start.attempt;
  place.master_address = start.address;
  place.master_port = options_.num_nodes > 1 ? port_beside(options_.master_port) : free_port();
  place.threads = placement_.threads;
  place.agent = agent;
  for (int local = 0; local < options_.num_ranks; ++local) {
    place.local_rank = local;
    place.rank = start.first_rank + local;
    ranks_.push_back(start_one(place, report.get(), output));
    started(ranks_.back());
  }
}

LocalRanks::Rank LocalRanks::start_one(const RankPlace& place, int report, Output& output) {
  RankProcess process;
  process.file = program_;
  process.is_binary = is_binary(options_, program_);
  process.arguments = options_.command;
  process.environment = rank_environment(options_, place);
  process.directory = options_.directory;
  if (!placement_.masks.empty()) process.mask = placement_.masks[static_cast<std::size_t>(place.local_rank)];
  auto [out, out_end] = make_pipe();
  auto [err, err_end] = make_pipe();
  process.in = options_.stdin_rank == place.rank && stdin_fd_ >= 0 ? stdin_fd_ : null_.get();
  process.out = out_end.get();
  process.err = err_end.get();
  process.report = report;
  process.open_files = open_files_;
  process.signals = signals_;
  output.add_rank(place.rank, std::move(out), std::move(err));
  return {place.rank, start_rank(process), true, false};
}

bool LocalRanks::reads_input() const {
  return stdin_fd_ >= 0 && std::any_of(ranks_.begin(), ranks_.end(),
                                       [&](const Rank& rank) { return options_.stdin_rank == rank.number; });
}

void LocalRanks::check_start() {
  if (!exec_errors_) return;
  int error = 0;
  const auto got = ::read(exec_errors_.get(), &error, sizeof error);
  if (got < 0 && errno == EAGAIN) return;
  exec_errors_.reset();  // Every rank has executed the program, or one failed to.
  if (got > 0)
    throw ConfigError(fmt::format("cannot start '{}': {}", options_.command[0],
                                  why_not_started(options_, program_, error)));
}

void LocalRanks::reap(const HasEnded& ended) {
  check_start();  // First, so that a failed exec does not look like the end of a program.
  for (siginfo_t info{}; ::waitid(P_ALL, 0, &info, WEXITED | WNOHANG) == 0 && info.si_pid != 0; info = {}) {
    const auto rank = std::find_if(ranks_.begin(), ranks_.end(),
                                   [&](const Rank& each) { return each.running && each.pid == info.si_pid; });
    if (rank == ranks_.end()) continue;
    rank->running = false;
    ended(*rank, how_it_ended(info));
  }
}

std::vector<LocalRanks::Rank> LocalRanks::running() const {
  std::vector<Rank> left;
  std::copy_if(ranks_.begin(), ranks_.end(), std::back_inserter(left),
               [](const Rank& rank) { return rank.running; });
  return left;
}

bool LocalRanks::was_killed(int number) const {
  return std::any_of(ranks_.begin(), ranks_.end(),
                     [&](const Rank& rank) { return rank.number == number && rank.killed; });
}

void LocalRanks::send(int signal) {
  for (const Rank& rank : ranks_)
    if (rank.running) send_to(rank, signal);
}

void LocalRanks::wake_for(int signal) {
  for (const Rank& rank : ranks_)
    if (rank.running) {
      send_to(rank, signal);
      if (is_stopped(rank)) send_to(rank, SIGCONT);
    }
}

void LocalRanks::kill() {
  for (Rank& rank : ranks_)
    if (rank.running) {
      rank.killed = true;
      send_to(rank, SIGKILL);
    }
}

void LocalRanks::kill_stopped() {
  for (Rank& rank : ranks_)
    if (rank.running && is_stopped(rank)) {
      rank.killed = true;
      send_to(rank, SIGKILL);
    }
}

std::vector<LocalRanks::Rank> LocalRanks::give_up() {
  const auto left = running();
  for (Rank& rank : ranks_) rank.running = false;
  return left;
}

}  // namespace lockstep::detail

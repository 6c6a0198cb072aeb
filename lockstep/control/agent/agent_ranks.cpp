// The agent's side towards the ranks of its host: their messages, whether they are alive, whether they are
// stopped.
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <system_error>

#include <fmt/format.h>
#include <lockstep/base/log.h>
#include <lockstep/control/agent/agent_loop.h>

namespace lockstep::control {

using detail::log;
using std::chrono::milliseconds;

namespace {

constexpr milliseconds kDying(300);  // Time after which a process without its lock counts as ended.
constexpr std::size_t kMostFlights = 250'000;
constexpr milliseconds kLongWait(400), kLookAtThreads(250);
constexpr milliseconds kNoFiles(100);  // Delay before accepting again.

}  // namespace

void Agent::Loop::accept_ranks() {
  while (auto socket = accept_local(listener_.get())) {
    if (!is_own(socket->get())) continue;  // Of another user: closed.
    Connection connection;
    connection.pid = peer_of(socket->get()).pid;
    connection.fd = std::move(*socket);
    connection.serial = ++last_serial_;
    connections_.push_back(std::move(connection));
  }
  // A connection that waits is not accepted for lack of descriptors; retrying at once would not help.
  if (errno != EMFILE && errno != ENFILE) return;
  accepts_again_ = Clock::now() + kNoFiles;
  if (!std::exchange(too_many_files_, true))
    options_.say("too many open files, so ranks cannot connect: raise ulimit -n");
}

void Agent::Loop::serve(Connection& connection) {
  char bytes[65536];
  try {
    for (;;) {
      const auto n = ::recv(connection.fd.get(), bytes, sizeof bytes, MSG_DONTWAIT);
      if (n < 0 && (errno == EAGAIN || errno == EINTR)) break;
      if (n <= 0) return gone(connection);
      connection.in.append({bytes, static_cast<std::size_t>(n)});
      while (auto frame = connection.in.next()) receive(connection, std::move(*frame));
    }
  } catch (const std::exception& error) {
    options_.say(fmt::format("closed the connection of process {}: {}", connection.pid, error.what()));
    gone(connection);
  }
}

void Agent::Loop::receive(Connection& connection, Frame frame) {
  if (frame.kind == Kind::hello) {
    auto hello = Hello::decode(frame.payload);
    // Otherwise the pid is the one in its own namespace.
    if (connection.pid != 0) hello.pid = connection.pid;
    connection.rank = hello.rank;
    connection.world = hello.world;
    frame.payload = hello.encode();
    frame.rank = hello.rank;
    frame.id = connection.serial;
    if (!connection.attached) attach(connection, hello);
    if (refusal_) return write(connection, {.kind = Kind::refused, .rank = hello.rank, .payload = *refusal_});
    connection.refused = false;
    connection.here = any_came_ = true;
    return up(std::move(frame));
  }
  if (connection.rank < 0) throw FrameError("a message arrived before the rank's hello");
  if (connection.refused) return;
  frame.rank = connection.rank;
  switch (frame.kind) {
    case Kind::attached:
      if (connection.attached && connection.rank < board_size_ && !std::exchange(connection.watched, true))
        watch(connection.rank, connection.pid);
      return;
    case Kind::leave:
      connection.here = false;
      send_rows(connection.rank);
      break;
    case Kind::fault:
      troubled_ = true;
      ranks_[connection.rank].error = Fault::decode(frame.payload).text;
      send_rows(connection.rank);
      break;
    case Kind::group:
    case Kind::stop:
    case Kind::stop_count:
    case Kind::missing:
    case Kind::store: break;
    default: throw FrameError(fmt::format("a rank sent a message of kind {}", static_cast<int>(frame.kind)));
  }
  up(std::move(frame));
}

void Agent::Loop::attach(Connection& connection, const Hello& hello) {
  const int grace =
      static_cast<int>(std::min<std::int64_t>(options_.stop_grace.count(), std::numeric_limits<int>::max()));
  const Attach attach{.agent_pid = ::getpid(), .agent_rank = agent_rank_, .stop_grace_ms = grace};
  const Frame frame{.kind = Kind::attach, .rank = hello.rank, .payload = attach.encode()};
  if (!board_) {
    try {
      board_ = std::make_shared<Board>(hello.size);
      board_size_ = hello.size;
    } catch (const std::system_error& error) {
      complain(error.what());
      return write(connection, frame);  // Works without a board: its connection reports its end.
    }
  }
  if (hello.rank >= board_size_) return;  // It will be refused: its size differs.
  const bool taken = std::any_of(connections_.begin(), connections_.end(), [&](const auto& each) {
    return &each != &connection && !each.closed && each.attached && each.rank == hello.rank;
  });
  if (taken) return;
  board_->prepare(hello.rank);
  times_seen_.erase(hello.rank);
  try {
    connection.attached = send_with_fd(connection.fd.get(), encode(frame), board_->fd());
  } catch (const Error& error) {
    // It may have ended meanwhile. Then reading reports that, after the messages it sent before.
    log(LogLevel::debug, "cannot send the board to process {}: {}", connection.pid, error.what());
  }
  if (!connection.attached) write(connection, frame);
}

// One thread per rank: old kernels have no way to wait for many such locks.
void Agent::Loop::watch(int rank, int pid) {
  auto look = [self = weak_from_this(), board = board_, rank, pid] {
    for (;;) {
      const auto died = board->holder_died(rank, milliseconds(500));
      auto loop = self.lock();
      if (!loop || loop->ending_ || died == false) return;
      if (!died) continue;
      loop->post([loop = loop.get(), rank, pid] {
        for (auto& connection : loop->connections_)
          if (connection.rank == rank && connection.pid == pid && !connection.closed) loop->gone(connection);
      });
      return;
    }
  };
  try {
    std::thread(std::move(look)).detach();
  } catch (const std::system_error& error) {
    // Then its end is known by its connection and by /proc.
    complain(fmt::format("cannot start a thread to watch rank {}: {}", rank, error.what()));
  }
}

void Agent::Loop::gone(Connection& connection) {
  if (connection.closed) return;
  connection.closed = true;
  const bool here = connection.here;
  connection.here = false;
  // If the rank is also connected from another process, this one is about to be refused.
  const bool second = std::any_of(connections_.begin(), connections_.end(), [&](const auto& each) {
    return each.here && each.rank == connection.rank;
  });
  if (!here || second) return;
  dying_.push_back({connection.rank, connection.pid});
  look_at_dying();
}

// A thread's lock is released before the whole process counts as ending.
void Agent::Loop::look_at_dying() {
  std::erase_if(dying_, [&](const Dying& each) {
    const auto process = control::look_at(each.pid);
    // A process that is gone was reaped by its parent. If the parent is `lockstep run`, it will report in a
    // moment how the process ended.
    const bool known = process ? process->ending : options_.local_ranks == 0;
    if (!known && Clock::now() - each.since < kDying) return false;
    report_end(each.rank, how_it_ended(each.pid, process));
    return true;
  });
}

void Agent::Loop::report_end(int rank, Ended how) {
  if (how.signal && how.note.empty() && options_.explain) how.note = options_.explain(how);
  if (!how.clean()) troubled_ = true;
  // The process that reaps it knows more than /proc.
  if (auto& known = ranks_[rank].how; !known || how.status || how.signal) known = how;
  send_rows(rank);
  up({.kind = Kind::rank_ended, .rank = rank, .payload = encode(how)});
}

void Agent::Loop::send_rows(int rank) {
  if (!board_ || rank < 0 || rank >= board_size_) return;
  auto rows = board_->rows(rank, times_seen_[rank]);
  if (rows.blocked > 0 && is_active(rank, rows)) rows.blocked = 0;
  up({.kind = Kind::rows, .rank = rank, .payload = rows.encode()});
}

// A rank whose threads are all blocked in operations may have another thread that has issued none yet and is
// about to. While such a thread is active, the rank does not count as blocked. Checking costs two files per
// thread, so it is done only after some time, and not every time.
bool Agent::Loop::is_active(int rank, const Rows& rows) {
  const bool waits_long =
      rows.blocked == rows.threads && std::all_of(rows.rows.begin(), rows.rows.end(), [](const Row& row) {
        return row.waits_for < 0 || row.waited_ms >= kLongWait.count();
      });
  if (!waits_long) return true;  // Not checked.
  auto& [at, active] = activity_[rank];
  if (Clock::now() - at < kLookAtThreads) return active;
  at = Clock::now();
  active = false;
  for (const auto& connection : connections_)
    if (connection.here && connection.rank == rank && connection.pid != 0)
      active = has_active_thread(connection.pid);
  return active;
}

// Includes killed ranks: the board keeps their memory.
void Agent::Loop::send_flights() {
  if (!board_ || options_.local_ranks == 0) return;
  using std::chrono::nanoseconds;
  const auto offset = nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count() -
                      nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  // With very many ranks fewer entries of each: one process gathers them all.
  const auto most = std::clamp(kMostFlights / static_cast<std::size_t>(board_size_), std::size_t{100},
                               std::size_t{FlightRing::kKept});
  for (const auto& [rank, state] : ranks_) {
    if (rank >= board_size_) continue;
    RankFlight flight{
        .pid = state.pid, .ended = state.how, .error = state.error, .log = board_->flight(rank)};
    for (auto& entry : flight.log.entries) {
      entry.began_ns += offset;
      if (entry.ended_ns != 0) entry.ended_ns += offset;
    }
    up({.kind = Kind::flight, .rank = rank, .payload = flight.encode(most)});
  }
}

void Agent::Loop::rank_started(int rank, int pid) {
  ranks_[rank] = {.pid = pid, .ended = false, .stopped = {}};
}

void Agent::Loop::rank_ended(int rank, Ended how) {
  ranks_[rank].ended = true;
  std::erase_if(dying_, [&](const Dying& each) { return each.rank == rank; });
  report_end(rank, std::move(how));
}

void Agent::Loop::look_at_stops() {
  if (paused_) {
    for (auto& [rank, state] : ranks_) state.stopped.reset();
    return;
  }
  for (auto& connection : connections_)
    if (connection.here && connection.pid != 0 && connection.pid != ::getpid()) {
      // A process that writes its core keeps its connection and its lock until that is done.
      if (auto process = control::look_at(connection.pid); process && process->ending)
        gone(connection);
      else
        look_at(connection.rank, connection.pid, process, ranks_[connection.rank]);
    }
  for (auto& [rank, state] : ranks_) {
    const bool connected =
        std::any_of(connections_.begin(), connections_.end(),
                    [&, r = rank](const auto& each) { return each.here && each.rank == r; });
    if (!connected && !state.ended && state.pid > 0)
      look_at(rank, state.pid, control::look_at(state.pid), state);
  }
}

void Agent::Loop::look_at(int rank, int pid, const std::optional<ProcessState>& process, LocalRank& state) {
  const auto now = Clock::now();
  const bool traced = process && process->state == 't', stopped = process && process->state == 'T';
  if (!traced && !stopped) {
    if (state.stopped && state.told)
      options_.say(fmt::format("rank {} (pid {}) resumed after {:.1f} s", rank, pid,
                               std::chrono::duration<double>(now - *state.stopped).count()));
    state.stopped.reset();
    state.told = false;
    return;
  }
  if (!state.stopped) state.stopped = now;
  const auto since = now - *state.stopped;
  if (traced) {
    // Breakpoints are short: only a long one is worth a line.
    if (!state.told && since >= milliseconds(500)) {
      options_.say(fmt::format("rank {} (pid {}) is held by a debugger (pid {}): it will not be killed", rank,
                               pid, process->tracer));
      state.told = true;
    }
    return;
  }
  const auto grace = options_.stop_grace;
  if (!state.told)
    options_.say(
        fmt::format("rank {} (pid {}) is stopped (SIGSTOP): it will be killed in {:.1f} s unless it resumes",
                    rank, pid, std::chrono::duration<double>(grace).count()));
  state.told = true;
  if (since < grace) return;
  Ended ended{.pid = pid, .status = {}, .signal = SIGKILL};
  ended.note = fmt::format("it had been stopped for {:.1f} s, longer than --stop-grace allows",
                           std::chrono::duration<double>(since).count());
  state.ended = true;
  report_end(rank, std::move(ended));
  ::kill(pid, SIGKILL);
}

void Agent::Loop::write(Connection& connection, const Frame& frame) {
  if (!connection.closed) connection.out += encode(frame);
}

void Agent::Loop::deliver(const Frame& frame) {
  const bool one_is_refused = frame.kind == Kind::refused && frame.id != 0;
  for (auto& connection : connections_) {
    const bool meant =
        one_is_refused ? frame.id == connection.serial : frame.rank < 0 || frame.rank == connection.rank;
    if (!meant || connection.rank < 0 || connection.refused) continue;
    write(connection, frame);
    if (one_is_refused) connection.refused = true, connection.here = false;
  }
}

}  // namespace lockstep::control

#include <lockstep/control/agent_loop.h>

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <system_error>

#include <fmt/format.h>
#include <lockstep/base/log.h>
#include <lockstep/base/quiet_threads.h>
#include <lockstep/version.h>

namespace lockstep::control {

using detail::log;
using std::chrono::milliseconds;

namespace {

constexpr milliseconds kTick(100);
constexpr milliseconds kDying(300);     // for a process whose lock is gone to count as ended
constexpr milliseconds kFlush(1000);    // at the end, for those who still read
constexpr milliseconds kEnd(5000);      // at the end, for a thread of ours; one that is stuck is left behind
constexpr milliseconds kSilence(1500);  // of another host: it says something ten times a second

void ring(const Fd& event) {
  const std::uint64_t one = 1;
  [[maybe_unused]] auto written = ::write(event.get(), &one, sizeof one);
}

void silence(const Fd& event) {
  std::uint64_t count = 0;
  [[maybe_unused]] auto drained = ::read(event.get(), &count, sizeof count);
}

}  // namespace

Agent::Loop::Loop(AgentOptions options)
    : options_(std::move(options)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      orders_event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  auto listener = listen_local(options_.name);
  if (!listener)
    throw NameInUse(
        fmt::format("the socket @{} is in use: another agent of this job is here", options_.name));
  listener_ = std::move(*listener);
  if (options_.local_ranks == 0) agent_rank_ = options_.agent_rank;
  if (!options_.head) return;

  Head::Options head;
  head.num_nodes = options_.num_nodes;
  head.launches = options_.local_ranks > 0;
  head.max_restarts = options_.max_restarts;
  head.join_timeout = options_.join_timeout;
  if (options_.link) {
    const Link& link = *options_.link;
    auto tcp = listen_tcp(link.address, link.port, link.last_port);
    address_ = tcp.text();
    head.address = tcp.address;
    // Who gives the number itself means it.
    const bool loopback = tcp.address.starts_with("127.") || tcp.address == "::1";
    if (loopback && (options_.local_ranks > 0 || tcp.address != link.address))
      options_.say(fmt::format("{} is {}, which only this host reaches", link.address, tcp.address));
    door_.emplace(std::move(tcp), link.key, link.job, options_.say);
  }
  Head::Ports ports;
  ports.say = options_.say;
  ports.send = [this](int node, Frame frame) {
    if (node == 0) return deliver(frame);
    for (Node& each : nodes_)
      if (each.number == node) send(each, frame);
  };
  ports.order = [this](int node, Order order) {
    if (node == 0) return push(std::move(order));
    for (Node& each : nodes_)
      if (each.number == node) send(each, {.kind = Kind::order, .payload = encode(order)});
  };
  head_ = std::make_unique<Head>(head, std::move(ports));
  head_->add_node({.node = 0,
                   .num_nodes = options_.num_nodes,
                   .local_ranks = options_.local_ranks,
                   .version = kVersion,
                   .address = head.address});
}

Agent::Loop::~Loop() = default;

void Agent::Loop::start() {
  std::optional<detail::QuietThreads> quiet(std::in_place);
  // Each keeps what it works on: one that is stuck at the end is left behind.
  auto begin = [this](std::thread& thread, std::future<void>& done, void (Loop::*work)()) {
    std::promise<void> promise;
    done = promise.get_future();
    thread = std::thread([self = shared_from_this(), work, promise = std::move(promise)]() mutable {
      ((*self).*work)();
      promise.set_value();
    });
  };
  try {
    begin(thread_, thread_done_, &Loop::run);
    if (!head_) begin(connector_, connector_done_, &Loop::connect_to_head);
  } catch (const std::system_error& error) {
    quiet.reset();
    end();
    throw Error(fmt::format("the agent's threads cannot be started: {}", error.what()));
  }
}

void Agent::Loop::end() {
  ending_ = true;
  ring(wake_);
  const auto limit = Clock::now() + kEnd;
  auto await = [&](std::thread& thread, std::future<void>& done) {
    if (!thread.joinable()) return;
    if (done.wait_until(limit) == std::future_status::ready)
      thread.join();
    else
      thread.detach();
  };
  await(connector_, connector_done_);
  await(thread_, thread_done_);
}

void Agent::Loop::post(std::function<void()> command) {
  std::lock_guard lock(mutex_);
  commands_.push_back(std::move(command));
  ring(wake_);
}

void Agent::Loop::push(Order order) {
  std::lock_guard lock(mutex_);
  if (std::holds_alternative<Start>(order)) started_ = true;
  if (std::holds_alternative<Finish>(order)) finished_ = true;
  orders_.push_back(std::move(order));
  ring(orders_event_);
}

std::vector<Order> Agent::Loop::take_orders() {
  std::lock_guard lock(mutex_);
  silence(orders_event_);
  std::vector<Order> orders(orders_.begin(), orders_.end());
  orders_.clear();
  return orders;
}

void Agent::Loop::run() {
  detail::set_log_prefix("agent");
  while (!ending_) guard([&] { turn(kTick); });
  const auto limit = Clock::now() + kFlush;
  while (!all_written() && Clock::now() < limit) guard([&] { turn(milliseconds(10)); });
}

// Whatever goes wrong with one thing, for lack of memory or descriptors say, ends neither the agent nor the
// rest of its work: all ranks of the host depend on it.
template <typename F>
void Agent::Loop::guard(F&& part) noexcept {
  try {
    part();
  } catch (const std::exception& error) {
    complain(error.what());
  }
}

void Agent::Loop::complain(const std::string& what) noexcept {
  try {
    if (Clock::now() >= next_trouble_) options_.say(fmt::format("the agent of this host: {}", what));
    next_trouble_ = Clock::now() + std::chrono::seconds(1);
    std::this_thread::sleep_for(milliseconds(1));  // it may come again at once
  } catch (const std::exception&) {                // there is no way to say it
  }
}

bool Agent::Loop::all_written() const {
  return std::all_of(connections_.begin(), connections_.end(),
                     [](const auto& each) { return each.out.empty(); }) &&
         std::all_of(nodes_.begin(), nodes_.end(), [](const auto& each) { return each.out.empty(); });
}

void Agent::Loop::turn(milliseconds limit) {
  std::vector<pollfd> polled{{wake_.get(), POLLIN, 0},
                             {Clock::now() < accepts_again_ ? -1 : listener_.get(), POLLIN, 0}};
  polled.push_back({door_ ? door_->fd() : -1, POLLIN, 0});
  auto events = [](const std::string& out) {
    return static_cast<short>(out.empty() ? POLLIN : POLLIN | POLLOUT);
  };
  for (auto& each : connections_) polled.push_back({each.fd.get(), events(each.out), 0});
  for (auto& each : nodes_) polled.push_back({each.fd.get(), events(each.out), 0});
  if (!dying_.empty()) limit = milliseconds(2);
  ::poll(polled.data(), polled.size(), static_cast<int>(limit.count()));
  guard([&] { look_at_dying(); });

  std::size_t at = 3;
  for (auto& each : connections_)
    if (polled[at++].revents != 0) serve(each);
  for (auto& each : nodes_) {
    if (at < polled.size() && polled[at++].revents != 0) serve(each);
  }
  if (polled[0].revents != 0) {
    silence(wake_);
    std::vector<std::function<void()>> commands;
    {
      std::lock_guard lock(mutex_);
      commands.swap(commands_);
    }
    for (auto& command : commands) guard(command);
  }
  if (polled[1].revents != 0) guard([&] { accept_ranks(); });
  if (door_) guard([&] { accept_nodes(); });
  if (Clock::now() - last_tick_ >= kTick) guard([&] { tick(); });
  for (auto& each : connections_)
    if (!each.closed && !flush(each.fd.get(), each.out)) gone(each);
  for (auto& each : nodes_)
    if (!each.closed && !flush(each.fd.get(), each.out)) lost(each, true, "the connection has ended");
  std::erase_if(connections_, [](const auto& each) { return each.closed; });
  std::erase_if(nodes_, [](const auto& each) { return each.closed; });
  note_desertion();
}

bool Agent::Loop::flush(int fd, std::string& out) {
  while (!out.empty()) {
    const auto sent = ::send(fd, out.data(), out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) return errno == EAGAIN || errno == EINTR;
    out.erase(0, static_cast<std::size_t>(sent));
  }
  return true;
}

void Agent::Loop::note_desertion() {
  int oldest = head_ ? head_->oldest_world() : kNoWorld;
  if (head_ && head_->refuses_more()) oldest = 0;
  for (const auto& each : connections_)
    if (each.here || !each.out.empty()) oldest = std::min(oldest, each.world);
  const bool deserted = oldest == kNoWorld && all_written();
  oldest_world_ = oldest;
  // The name is free for another job then; those who have a connection may come again.
  if (deserted && any_came_ && options_.local_ranks == 0 && listener_) listener_.reset();
}

void Agent::Loop::tick() {
  last_tick_ = Clock::now();
  look_at_stops();
  for (const auto& connection : connections_)
    if (connection.here && connection.attached) send_rows(connection.rank);
  if (head_) head_->tick(last_tick_);
  for (Node& node : nodes_) {
    if (node.closed) continue;
    if (node.number >= 0 || !head_) send(node, {.kind = Kind::ping});
    look_at_silence(node);
  }
}

// A host that answers though its agent does not: the rank that holds the agent is stopped, or waits for a
// disk. It has the time that any rank has which is stopped.
void Agent::Loop::look_at_silence(Node& node) {
  const auto silent = last_tick_ - node.heard;
  if (silent <= kSilence) {
    if (std::exchange(node.told, false)) options_.say(fmt::format("the agent at {} goes on", node.from));
    return;
  }
  const auto most = std::max(options_.stop_grace, kSilence);
  const bool answers = acknowledged_within(node.fd.get(), kSilence);
  if (!answers || silent > most)
    return lost(
        node, false,
        fmt::format("nothing was heard from it for {:.1f} s", std::chrono::duration<double>(silent).count()));
  if (!std::exchange(node.told, true))
    options_.say(
        fmt::format("the agent at {} says nothing, though its host is there: it is given up after {:.1f} s",
                    node.from, std::chrono::duration<double>(most).count()));
}

// ---- ranks of this host -----------------------------------------------------------------------------------

void Agent::Loop::accept_ranks() {
  while (auto socket = accept_local(listener_.get())) {
    if (!is_own(socket->get())) continue;  // another user's: closed
    Connection connection;
    connection.pid = peer_of(socket->get()).pid;
    connection.fd = std::move(*socket);
    connection.serial = ++last_serial_;
    connections_.push_back(std::move(connection));
  }
  // Whoever waits there is not taken for lack of descriptors: looking again at once would not help.
  if (errno != EMFILE && errno != ENFILE) return;
  accepts_again_ = Clock::now() + kTick;
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
    options_.say(fmt::format("process {} was cut off: {}", connection.pid, error.what()));
    gone(connection);
  }
}

void Agent::Loop::receive(Connection& connection, Frame frame) {
  if (frame.kind == Kind::hello) {
    auto hello = Hello::decode(frame.payload);
    if (connection.pid != 0) hello.pid = connection.pid;  // else it says how it is called where it lives
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
  if (connection.rank < 0) throw FrameError("it spoke before it said who it is");
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
    case Kind::fault: send_rows(connection.rank); break;
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
      return write(connection, frame);  // it does without: its end is known by its connection
    }
  }
  if (hello.rank >= board_size_) return;  // it will be refused: its size is another
  const bool taken = std::any_of(connections_.begin(), connections_.end(), [&](const auto& each) {
    return &each != &connection && !each.closed && each.attached && each.rank == hello.rank;
  });
  if (taken) return;
  board_->prepare(hello.rank);
  try {
    connection.attached = send_with_fd(connection.fd.get(), encode(frame), board_->fd());
  } catch (const Error& error) {
    // It may have ended meanwhile: then reading from it tells, and what it said before that counts.
    log(LogLevel::debug, "the board did not reach process {}: {}", connection.pid, error.what());
  }
  if (!connection.attached) write(connection, frame);
}

// A thread per rank: the kernel has no way to wait for many such locks that old kernels have too.
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
    // Its end is known by its connection then, and by looks at /proc.
    complain(fmt::format("no thread to watch rank {}: {}", rank, error.what()));
  }
}

void Agent::Loop::gone(Connection& connection) {
  if (connection.closed) return;
  connection.closed = true;
  const bool here = connection.here;
  connection.here = false;
  // Of a rank that is here in another process too, this one is about to be refused.
  const bool second = std::any_of(connections_.begin(), connections_.end(), [&](const auto& each) {
    return each.here && each.rank == connection.rank;
  });
  if (!here || second) return;
  dying_.push_back({connection.rank, connection.pid});
  look_at_dying();
}

// The lock of a thread is given up before the whole process counts as ending.
void Agent::Loop::look_at_dying() {
  std::erase_if(dying_, [&](const Dying& each) {
    const auto process = control::look_at(each.pid);
    // One that is gone was waited for by its parent: where that is `lockstep run`, it says in a moment how it
    // ended.
    const bool known = process ? process->ending : options_.local_ranks == 0;
    if (!known && Clock::now() - each.since < kDying) return false;
    report_end(each.rank, how_it_ended(each.pid, process));
    return true;
  });
}

void Agent::Loop::report_end(int rank, Ended how) {
  if (how.signal && how.note.empty() && options_.explain) how.note = options_.explain(how);
  send_rows(rank);
  up({.kind = Kind::rank_ended, .rank = rank, .payload = encode(how)});
}

void Agent::Loop::send_rows(int rank) {
  if (!board_ || rank < 0 || rank >= board_size_) return;
  up({.kind = Kind::rows, .rank = rank, .payload = board_->rows(rank).encode()});
}

void Agent::Loop::rank_started(int rank, int pid) {
  ranks_[rank] = {.pid = pid, .ended = false, .stopped = {}};
}

void Agent::Loop::rank_ended(int rank, Ended how) {
  ranks_[rank].ended = true;
  std::erase_if(dying_, [&](const Dying& each) { return each.rank == rank; });
  report_end(rank, std::move(how));
}

void Agent::Loop::node_done() {
  // What the ranks of an attempt left open belongs to it.
  for (auto& connection : connections_) connection.here = false, connection.closed = true;
  ranks_.clear();
  board_.reset();
  if (failed_ || (!head_ && nodes_.empty())) return push(Finish{.status = 1, .why = {}});
  up({.kind = Kind::node_done});
}

void Agent::Loop::stop(int signal) {
  // There is no head yet that could end the job, and nothing has been started here.
  if (!head_ && nodes_.empty() && options_.local_ranks > 0 && !started_)
    return push(Finish{.status = 128 + signal, .why = {}});
  up({.kind = Kind::stop, .payload = Writer().number(signal).take()});
}

void Agent::Loop::paused(bool paused) {
  paused_ = paused;
  if (head_) head_->paused(paused);
}

void Agent::Loop::look_at_stops() {
  if (paused_) {
    for (auto& [rank, state] : ranks_) state.stopped.reset();
    return;
  }
  for (auto& connection : connections_)
    if (connection.here && connection.pid != 0 && connection.pid != ::getpid()) {
      // One that writes its core keeps its connection and its lock until that is done.
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
      options_.say(fmt::format("rank {} (pid {}) goes on after {:.1f} s", rank, pid,
                               std::chrono::duration<double>(now - *state.stopped).count()));
    state.stopped.reset();
    state.told = false;
    return;
  }
  if (!state.stopped) state.stopped = now;
  const auto since = now - *state.stopped;
  if (traced) {
    // Breakpoints come and go: only one that lasts is worth a line.
    if (!state.told && since >= milliseconds(500)) {
      options_.say(fmt::format("rank {} (pid {}) is held by a debugger (pid {}): it is not ended", rank, pid,
                               process->tracer));
      state.told = true;
    }
    return;
  }
  const auto grace = options_.stop_grace;
  if (!state.told)
    options_.say(
        fmt::format("rank {} (pid {}) is stopped (SIGSTOP): it is ended in {:.1f} s unless it goes on", rank,
                    pid, std::chrono::duration<double>(grace).count()));
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

void Agent::Loop::up(Frame frame) {
  if (head_) return head_->receive(0, frame);
  if (!nodes_.empty()) return send(nodes_.front(), frame);
  if (!failed_ && unsent_.size() < 100'000) unsent_.push_back(std::move(frame));
}

}  // namespace lockstep::control

#include <lockstep/control/client.h>

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/log.h>
#include <lockstep/base/start_thread.h>
#include <lockstep/control/agent/process.h>

namespace lockstep::control {

using detail::log;
using std::chrono::milliseconds;

namespace {

constexpr milliseconds kLookAtAgent(250);

// Cached, because getpid() is a system call, and World::step() needs it in every step.
std::atomic<int> this_process = 0;

int process_id() {
  static const int watched = ::pthread_atfork(nullptr, nullptr, [] { this_process = ::getpid(); });
  if (watched != 0) throw std::system_error(watched, std::generic_category(), "pthread_atfork");
  return this_process = ::getpid();
}

}  // namespace

std::shared_ptr<Client> Client::make(Fd agent) {
  std::shared_ptr<Client> client(new Client(std::move(agent)));
  // The thread keeps the client alive until the process or the agent ends.
  detail::start_thread("the connection to the agent", [client] { client->listen(); }).detach();
  return client;
}

Client::Client(Fd agent)
    : process_(process_id()),
      socket_(std::move(agent)),
      stop_event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

Client::~Client() = default;

bool Client::in_child() const { return this_process.load(std::memory_order_relaxed) != process_; }

bool Client::write(const Frame& frame) {
  if (in_child()) return false;
  const auto bytes = encode(frame);
  std::lock_guard lock(write_mutex_);
  std::size_t sent = 0;
  const auto deadline = Clock::now() + std::chrono::seconds(10);
  while (sent < bytes.size()) {
    const auto n = ::send(socket_.get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (n >= 0) {
      sent += static_cast<std::size_t>(n);
      continue;
    }
    if (errno != EAGAIN && errno != EINTR) return false;
    pollfd writable{socket_.get(), POLLOUT, 0};
    ::poll(&writable, 1, 100);
    if (Clock::now() <= deadline) continue;
    // After half a message, later ones could not be parsed.
    if (sent > 0) ::shutdown(socket_.get(), SHUT_RDWR);
    return false;
  }
  return true;
}

Welcome Client::join(const Hello& hello, milliseconds timeout,
                     std::function<void(const Failure&)> on_failure) {
  const auto deadline = Clock::now() + timeout;
  {
    std::lock_guard lock(mutex_);
    rank_ = hello.rank;
    size_ = hello.size;
    welcome_.reset();
    stop_count_ = 0;
    on_failure_ = nullptr;
    here_ = true;
  }
  write({.kind = Kind::hello, .rank = hello.rank, .payload = hello.encode()});
  std::unique_lock lock(mutex_);
  auto settled = [&] { return welcome_ || refused_ || failure_; };
  if (!changed_.wait_until(lock, deadline, settled)) {
    // The coordinator then reports the missing ranks to every rank, including this one.
    lock.unlock();
    write({.kind = Kind::missing, .rank = hello.rank});
    lock.lock();
    if (!changed_.wait_for(lock, std::chrono::seconds(2), settled))
      throw JoinError("the agent of this host did not answer");
  }
  if (refused_) throw ConfigError(*refused_);
  if (failure_ && !attach_) throw AgentGone(failure_->text());
  if (failure_) throw_failure();
  on_failure_ = std::move(on_failure);
  return *welcome_;
}

void Client::leave() noexcept {
  if (in_child()) return;
  try {
    {
      std::lock_guard lock(mutex_);
      on_failure_ = nullptr;
      if (!here_) return;
      here_ = false;
    }
    write({.kind = Kind::leave, .rank = rank_});
  } catch (const std::exception& error) {
    log(LogLevel::warn, "cannot leave the job properly: {}", error.what());
  }
}

StoreReply Client::ask(const StoreRequest& request, Clock::time_point deadline,
                       const std::function<bool()>& failed) {
  if (in_child()) throw Error("this process was forked from a rank and is not a rank itself");
  request.check();
  std::unique_lock lock(mutex_);
  const auto id = next_id_++;
  replies_[id];
  lock.unlock();
  const bool written = write({.kind = Kind::store, .rank = rank_, .id = id, .payload = request.encode()});
  lock.lock();
  if (written)
    changed_.wait_until(lock, deadline,
                        [&] { return replies_[id] || failure_ || gone_ || refused_ || failed(); });
  auto reply = std::move(replies_[id]);
  replies_.erase(id);
  if (reply) {
    if (!reply->error.empty()) throw Error(reply->error);
    return std::move(*reply);
  }
  if (failure_) throw_failure();
  if (refused_) throw ConfigError(*refused_);
  if (failed()) throw Error("the job has failed");
  if (!written || gone_) throw Error("the connection to the control plane is closed");
  lock.unlock();
  // Cancels the request; otherwise the coordinator would keep it for a rank that asks repeatedly.
  if (request.call == StoreCall::get || request.call == StoreCall::wait)
    write({.kind = Kind::store,
           .rank = rank_,
           .id = id,
           .payload = StoreRequest{.call = StoreCall::forget, .number = id}.encode()});
  // Engines look for the word "timeout" and try again.
  throw Error(fmt::format("store: timeout for: {}", fmt::join(request.keys, ", ")));
}

std::shared_ptr<StatusWriter> Client::status() const {
  if (in_child()) return nullptr;
  std::lock_guard lock(mutex_);
  return status_;
}

void Client::tell(const GroupMade& group) noexcept {
  try {
    write({.kind = Kind::group, .rank = rank_, .payload = group.encode()});
  } catch (const std::exception& error) {
    log(LogLevel::warn, "cannot announce a group to the agent: {}", error.what());
  }
}

void Client::tell(const Fault& fault) noexcept {
  try {
    write({.kind = Kind::fault, .rank = rank_, .payload = fault.encode()});
  } catch (const std::exception&) {  // the rank is failing already
  }
}

bool Client::stop_requested() {
  if (in_child()) return false;
  std::unique_lock lock(mutex_);
  if (stop_prepared_ && stop_at_ < 0) changed_.wait(lock, [&] { return stop_at_ >= 0 || failure_ || gone_; });
  const bool stops = stop_at_ >= 0 && stop_count_ >= stop_at_;
  if (!stops) ++stop_count_;
  return stops;
}

void Client::request_stop(int signal) noexcept {
  if (in_child()) return;
  stop_signal_ = signal;
  const std::uint64_t one = 1;
  [[maybe_unused]] auto written = ::write(stop_event_.get(), &one, sizeof one);
}

void Client::wake() {
  if (in_child()) return;
  std::lock_guard lock(mutex_);
  changed_.notify_all();
}

std::optional<Failure> Client::failure(milliseconds limit) {
  if (in_child()) return std::nullopt;
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, limit, [&] { return failure_.has_value(); });
  return failure_;
}

bool Client::usable() const {
  if (in_child()) return false;
  std::lock_guard lock(mutex_);
  return !failure_ && !refused_ && !gone_;
}

bool Client::is_launched() const {
  if (in_child()) return false;
  std::lock_guard lock(mutex_);
  return attach_ && attach_->agent_rank < 0;
}

int Client::rank() const {
  std::lock_guard lock(mutex_);
  return rank_;
}

void Client::throw_failure() const { throw JoinError(failure_->text()); }

void Client::listen() {
  FrameBuffer frames;
  Fd descriptor;
  char bytes[65536];
  for (;;) {
    pollfd polled[] = {{socket_.get(), POLLIN, 0}, {stop_event_.get(), POLLIN, 0}};
    ::poll(polled, 2, static_cast<int>(kLookAtAgent.count()));
    const bool ended = agent_has_ended();
    if (polled[1].revents != 0) {
      std::uint64_t count = 0;
      [[maybe_unused]] auto drained = ::read(stop_event_.get(), &count, sizeof count);
    }
    if (const int signal = stop_signal_.exchange(0))
      write({.kind = Kind::stop, .rank = rank_, .payload = Writer().number(signal).take()});
    if (ended && ::poll(polled, 1, 0) == 0) break;  // Read its last messages first.
    if (polled[0].revents == 0) continue;
    try {
      auto received = receive_fd(socket_.get(), bytes);
      if (!received) continue;
      if (received->fd) descriptor = std::move(received->fd);
      if (received->size == 0) break;
      frames.append({bytes, received->size});
      while (auto frame = frames.next()) receive(std::move(*frame), std::move(descriptor));
    } catch (const std::exception& error) {
      log(LogLevel::debug, "control plane: {}", error.what());
      break;
    }
  }
  agent_is_gone();
  // By the thread that holds the lock: the next World of this process may connect to another agent.
  if (holding_) board_->let_go(rank_);
}

void Client::receive(Frame frame, Fd descriptor) {
  switch (frame.kind) {
    case Kind::attach: return attach(Attach::decode(frame.payload), std::move(descriptor));
    case Kind::verdict: return fail(decode_failure(frame.payload));
    case Kind::reply: {
      auto reply = StoreReply::decode(frame.payload);
      std::lock_guard lock(mutex_);
      if (auto asked = replies_.find(frame.id); asked != replies_.end()) asked->second = std::move(reply);
      break;
    }
    case Kind::welcome: {
      std::lock_guard lock(mutex_);
      welcome_ = Welcome::decode(frame.payload);
      break;
    }
    case Kind::refused: {
      std::lock_guard lock(mutex_);
      refused_ = frame.payload;
      break;
    }
    case Kind::stop_prepare: {
      std::int64_t count = 0;
      {
        std::lock_guard lock(mutex_);
        stop_prepared_ = true;
        count = stop_count_;
      }
      write({.kind = Kind::stop_count, .rank = rank_, .payload = Writer().number(count).take()});
      break;
    }
    case Kind::stop_at: {
      Reader in(frame.payload);
      std::lock_guard lock(mutex_);
      stop_at_ = in.number(0, INT64_MAX);
      break;
    }
    default: break;  // Of a later version.
  }
  std::lock_guard lock(mutex_);
  changed_.notify_all();
}

void Client::attach(const Attach& attach, Fd descriptor) {
  int rank = 0;
  std::shared_ptr<Board> board;
  {
    std::lock_guard lock(mutex_);
    attach_ = attach;
    // Not the pid that the agent reports: it may live in another pid namespace.
    agent_process_ = peer_of(socket_.get()).pid;
    const auto process = look_at(agent_process_);
    if (process)
      agent_start_ = process->start;
    else
      agent_process_ = 0;
    if (!descriptor || board_) return;
    try {
      board = board_ = std::make_shared<Board>(descriptor.release(), size_);
    } catch (const std::system_error& error) {
      log(LogLevel::warn, "cannot map this rank's status page, continuing without it: {}", error.what());
      return;
    }
    rank = rank_;
    status_ = std::make_shared<StatusWriter>(board_, rank);
    holding_ = board->hold(rank);
  }
  write({.kind = Kind::attached, .rank = rank});
}

void Client::fail(Failure failure) {
  std::function<void(const Failure&)> tell;
  {
    std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = failure;
    tell = on_failure_;
    changed_.notify_all();
  }
  if (tell) tell(failure);
}

Failure Client::failure_of_agent(std::string cause) const {
  Failure failure;
  failure.rank = attach_ ? attach_->agent_rank : -1;
  failure.pid = attach_ ? attach_->agent_pid : 0;
  if (failure.rank < 0) failure.kind = CommError::Kind::stopped;
  failure.cause = failure.rank >= 0
                      ? std::move(cause)
                      : fmt::format("lockstep run (process {}) {}", failure.pid, std::move(cause));
  return failure;
}

void Client::agent_is_gone() {
  bool here = false;
  std::optional<Failure> failure;
  {
    std::lock_guard lock(mutex_);
    gone_ = true;
    here = here_;
    if (here && attach_) {
      const auto process = look_at(agent_process_);
      const bool same = process && process->start == agent_start_;
      auto ended = how_it_ended(attach_->agent_pid, same ? process : std::nullopt);
      ended.note.clear();
      failure = failure_of_agent(ended.text() + ", and with it the control plane of this host");
    } else if (here) {
      failure = Failure{};
      failure->cause = "the agent of this host closed the connection";
    }
    changed_.notify_all();
  }
  if (failure) fail(std::move(*failure));
}

// The connection's end reports it, unless a descendant of the agent's process holds a copy of the connection.
// An agent inside a stopped rank reports nothing.
bool Client::agent_has_ended() {
  std::optional<Failure> failure;
  {
    std::lock_guard lock(mutex_);
    if (!attach_ || !here_ || agent_process_ == 0 || agent_process_ == process_) return false;
    const auto process = look_at(agent_process_);
    if (!process || process->ending || process->start != agent_start_) return true;
    if (process->state != 'T') {
      if (agent_stopped_)
        log(LogLevel::warn, "the agent of this host (process {}) resumed", attach_->agent_pid);
      agent_stopped_.reset();
      return false;
    }
    const auto now = Clock::now();
    if (!agent_stopped_) {
      agent_stopped_ = now;
      log(LogLevel::warn, "{} is stopped (SIGSTOP), and with it the control plane of this host",
          attach_->agent_rank >= 0 ? fmt::format("rank {} (pid {})", attach_->agent_rank, attach_->agent_pid)
                                   : fmt::format("lockstep run (pid {})", attach_->agent_pid));
    }
    if (now - *agent_stopped_ >= milliseconds(attach_->stop_grace_ms) && attach_->stop_grace_ms > 0)
      failure = failure_of_agent(fmt::format("was stopped for {:.1f} s",
                                             std::chrono::duration<double>(now - *agent_stopped_).count()));
  }
  if (failure) fail(std::move(*failure));
  return false;
}

}  // namespace lockstep::control

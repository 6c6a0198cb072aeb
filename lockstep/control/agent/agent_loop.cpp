#include <lockstep/control/agent/agent_loop.h>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include <fmt/format.h>
#include <lockstep/base/log.h>
#include <lockstep/base/quiet_threads.h>
#include <lockstep/base/start_thread.h>
#include <lockstep/os/host.h>
#include <lockstep/version.h>

namespace lockstep::control {

using std::chrono::milliseconds;

namespace {

constexpr milliseconds kTick(100);
constexpr milliseconds kFlush(1000);  // At the end, for peers that still read.
constexpr milliseconds kEnd(5000);    // At the end, for a thread; one that is stuck is detached.

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
    throw NameInUse(fmt::format("the socket @{} is in use by another agent of this job", options_.name));
  listener_ = std::move(*listener);
  if (options_.local_ranks == 0) agent_rank_ = options_.agent_rank;
  if (!options_.coordinator) return;

  Coordinator::Options coordinator;
  coordinator.num_nodes = options_.num_nodes;
  coordinator.launches = options_.local_ranks > 0;
  coordinator.max_restarts = options_.max_restarts;
  coordinator.join_timeout = options_.join_timeout;
  coordinator.cores = host::available_cores();
  if (options_.link) {
    const Link& link = *options_.link;
    auto tcp = listen_tcp(link.address, link.port, link.last_port);
    address_ = tcp.text();
    coordinator.address = tcp.address;
    // A numeric loopback address was chosen deliberately.
    const bool loopback = tcp.address.starts_with("127.") || tcp.address == "::1";
    if (loopback && (options_.local_ranks > 0 || tcp.address != link.address))
      options_.say(
          fmt::format("{} resolves to {}, which only this host can reach", link.address, tcp.address));
    acceptor_.emplace(std::move(tcp), link.key, link.job, options_.say);
  }
  Coordinator::Ports ports;
  ports.say = options_.say;
  ports.status = options_.status;
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
  ports.flight = options_.flight;
  coordinator_ = std::make_unique<Coordinator>(coordinator, std::move(ports));
  coordinator_->add_node({.node = 0,
                          .num_nodes = options_.num_nodes,
                          .local_ranks = options_.local_ranks,
                          .version = kVersion,
                          .address = coordinator.address});
}

Agent::Loop::~Loop() = default;

void Agent::Loop::start() {
  std::optional<detail::QuietThreads> quiet(std::in_place);
  // Each thread owns a reference to the loop: one that is stuck at the end is detached.
  auto begin = [this](std::thread& thread, std::future<void>& done, void (Loop::*work)()) {
    std::promise<void> promise;
    done = promise.get_future();
    thread = detail::start_thread("the agent",
                                  [self = shared_from_this(), work, promise = std::move(promise)]() mutable {
                                    ((*self).*work)();
                                    promise.set_value();
                                  });
  };
  try {
    begin(thread_, thread_done_, &Loop::run);
    if (!coordinator_) begin(connector_, connector_done_, &Loop::connect_to_head);
  } catch (const std::system_error& error) {
    quiet.reset();
    end();
    throw Error(error.what());
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
  if (std::holds_alternative<Failed>(order)) troubled_ = true;
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
  ::prctl(PR_SET_NAME, "lockstep-agent");  // Also inside a rank: has_active_thread recognises the name.
  while (!ending_) guard([&] { turn(kTick); });
  const auto limit = Clock::now() + kFlush;
  while (!all_written() && Clock::now() < limit) guard([&] { turn(milliseconds(10)); });
}

// A problem with one task, such as a lack of memory or descriptors, ends neither the agent nor its other
// tasks: all ranks of the host depend on it.
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
    std::this_thread::sleep_for(milliseconds(1));  // The problem may persist.
  } catch (const std::exception&) {                // It cannot be reported.
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
  polled.push_back({acceptor_ ? acceptor_->fd() : -1, POLLIN, 0});
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
  if (acceptor_) guard([&] { accept_nodes(); });
  if (Clock::now() - last_tick_ >= kTick) guard([&] { tick(); });
  for (auto& each : connections_)
    if (!each.closed && !flush(each.fd.get(), each.out)) gone(each);
  for (auto& each : nodes_)
    if (!each.closed && !flush(each.fd.get(), each.out)) lost(each, true, why_closed(errno));
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
  int oldest = coordinator_ ? coordinator_->oldest_world() : kNoWorld;
  if (coordinator_ && coordinator_->refuses_more()) oldest = 0;
  for (const auto& each : connections_)
    if (each.here || !each.out.empty()) oldest = std::min(oldest, each.world);
  const bool deserted = oldest == kNoWorld && all_written();
  oldest_world_ = oldest;
  // The name is then free for another job. Ranks that have a connection may join again.
  if (deserted && any_came_ && options_.local_ranks == 0 && listener_) listener_.reset();
}

void Agent::Loop::tick() {
  const auto now = Clock::now();
  // While this process was stopped or its machine frozen, it could not hear anything.
  if (const auto gap = now - last_tick_; gap > 5 * kTick)
    for (Node& node : nodes_) node.heard = std::min(now, node.heard + gap);
  last_tick_ = now;
  look_at_stops();
  for (const auto& connection : connections_)
    if (connection.here && connection.attached) send_rows(connection.rank);
  if (coordinator_) coordinator_->tick(last_tick_);
  for (Node& node : nodes_) {
    if (node.closed) continue;
    if (node.number >= 0 || !coordinator_) send(node, {.kind = Kind::ping});
    look_at_silence(node);
  }
}

void Agent::Loop::node_done() {
  // The job must end even without a flight record.
  if (troubled_.exchange(false)) guard([&] { send_flights(); });
  // Connections left open by the ranks belong to the finished attempt.
  for (auto& connection : connections_) connection.here = false, connection.closed = true;
  ranks_.clear();
  times_seen_.clear();
  activity_.clear();
  board_.reset();
  if (failed_ || (!coordinator_ && nodes_.empty())) return push(Finish{.status = 1, .why = {}});
  up({.kind = Kind::node_done});
}

void Agent::Loop::stop(int signal) {
  // No coordinator is connected yet that could end the job, and nothing has been started here.
  if (!coordinator_ && nodes_.empty() && options_.local_ranks > 0 && !started_)
    return push(Finish{.status = 128 + signal, .why = {}});
  up({.kind = Kind::stop, .payload = Writer().number(signal).take()});
}

void Agent::Loop::paused(bool paused) {
  paused_ = paused;
  if (coordinator_) coordinator_->paused(paused);
}

void Agent::Loop::up(Frame frame) {
  if (coordinator_) return coordinator_->receive(0, frame);
  if (!nodes_.empty()) return send(nodes_.front(), frame);
  if (!failed_ && unsent_.size() < 100'000) unsent_.push_back(std::move(frame));
}

}  // namespace lockstep::control

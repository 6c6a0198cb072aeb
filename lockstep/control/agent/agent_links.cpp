// The agent's connections between hosts: accepting them on the coordinator, and connecting to it.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <lockstep/control/agent/agent_loop.h>
#include <lockstep/version.h>

namespace lockstep::control {

using std::chrono::milliseconds;

namespace {

// Limit for silence of another host, which sends something ten times a second.
constexpr milliseconds kSilence(1500);
constexpr milliseconds kAnswer(700);  // Time within which a live host acknowledges what it is sent.

}  // namespace

void Agent::Loop::accept_nodes() {
  for (auto& guest : acceptor_->serve()) {
    Node node;
    node.fd = std::move(guest.fd);
    node.link = std::make_unique<SecureLink>(std::move(guest.link));
    node.from = guest.from;
    nodes_.push_back(std::move(node));
    serve(nodes_.back());  // Data that arrived with the proof.
  }
}

void Agent::Loop::serve(Node& node) {
  char bytes[65536];
  try {
    for (;;) {
      while (auto message = node.link->next()) {
        node.in.append({message->data(), message->size()});
        while (auto frame = node.in.next()) receive(node, std::move(*frame));
      }
      if (node.closed) return;
      const auto n = ::recv(node.fd.get(), bytes, sizeof bytes, MSG_DONTWAIT);
      if (n < 0 && (errno == EAGAIN || errno == EINTR)) break;
      if (n <= 0) return lost(node, true, why_closed(n == 0 ? ECONNRESET : errno));
      node.heard = Clock::now();
      node.link->receive({bytes, static_cast<std::size_t>(n)});
    }
  } catch (const std::exception& error) {
    lost(node, false, error.what());
  }
}

void Agent::Loop::receive(Node& node, Frame frame) {
  if (!coordinator_) {
    if (frame.kind == Kind::ping) return;
    if (frame.kind == Kind::attach) {
      head_holder_ = Attach::decode(frame.payload);
      return;
    }
    if (frame.kind == Kind::order) {
      auto order = decode_order(frame.payload);
      return push(std::move(order));
    }
    if (frame.kind == Kind::refused && frame.rank == -2) {  // The coordinator rejected this node.
      node.closed = true;
      return head_unreachable(frame.payload, true);
    }
    return deliver(frame);
  }
  if (node.number >= 0) {
    if (frame.kind != Kind::ping) coordinator_->receive(node.number, frame);
    return;
  }
  if (frame.kind != Kind::node_hello) throw FrameError("a message arrived before the node's hello");
  auto hello = NodeHello::decode(frame.payload);
  hello.address = node.from;
  try {
    if (hello.version != kVersion)
      throw ConfigError(
          fmt::format("hosts run different versions of lockstep: {} on the coordinator, {} on {}", kVersion,
                      hello.version, node.from));
    node.number = hello.node;  // Before the coordinator starts anything on it.
    send(node, {.kind = Kind::attach,
                .payload = Attach{.agent_pid = ::getpid(), .agent_rank = agent_rank_}.encode()});
    node.number = coordinator_->add_node(hello);
  } catch (const ConfigError& error) {
    node.number = -1;
    send(node, {.kind = Kind::refused, .rank = -2, .payload = error.what()});
    options_.say(fmt::format("refused {}: {}", node.from, error.what()));
  }
}

void Agent::Loop::send(Node& node, const Frame& frame) {
  if (node.closed) return;
  node.link->send(encode(frame));
  node.out += node.link->take_output();
}

// Explains a connection that ended with this error: closed by the other host's kernel, or lost.
std::string Agent::Loop::why_closed(int error) const {
  if (error != ECONNRESET && error != EPIPE) return "the connection was lost";
  return options_.local_ranks > 0 ? "its lockstep run has ended" : "it has closed the connection";
}

void Agent::Loop::leave_hosts() {
  for (Node& node : nodes_) {
    node.closed = true;
    node.fd.reset();
  }
}

// A host may answer although its agent does not: the rank that runs the agent is stopped, or waits for a
// disk. It gets the same time as any stopped rank.
void Agent::Loop::look_at_silence(Node& node) {
  const auto silent = last_tick_ - node.heard;
  if (silent <= kSilence) {
    if (std::exchange(node.told, false))
      options_.say(fmt::format("the agent at {} responds again", node.from));
    return;
  }
  const auto most = std::max(options_.stop_grace, kSilence);
  const bool answers = acknowledged_within(node.fd.get(), kSilence);
  // Data that arrived just before the connection failed does not acknowledge later data.
  const bool answers_still = acknowledged_within(node.fd.get(), kAnswer);
  if (!answers || silent > most)
    return lost(node, false,
                fmt::format("it sent nothing for {:.1f} s", std::chrono::duration<double>(silent).count()));
  if (answers_still && !std::exchange(node.told, true))
    options_.say(
        fmt::format("the agent at {} does not respond, although its host does; giving up after {:.1f} s",
                    node.from, std::chrono::duration<double>(most).count()));
}

// ---- ranks of this host -----------------------------------------------------------------------------------

void Agent::Loop::lost(Node& node, bool closed, const std::string& why) {
  if (node.closed) return;
  node.closed = true;
  if (coordinator_) {
    if (node.number >= 0) coordinator_->node_lost(node.number, closed, why);
    return;
  }
  if (finished_) return;
  Failure failure;
  if (closed && head_holder_ && head_holder_->agent_rank >= 0) {
    failure.rank = head_holder_->agent_rank;
    failure.pid = head_holder_->agent_pid;
    failure.cause = fmt::format("has ended, and with it the coordinator of the job at {}", node.from);
  } else {
    failure.cause = fmt::format("the coordinator of the job at {} is lost: {}", node.from, why);
  }
  fail_here(std::move(failure));
}

// The coordinator cannot report the failure, so it is reported here.
void Agent::Loop::fail_here(Failure failure) {
  if (failed_) return;
  failed_ = true;
  deliver({.kind = Kind::verdict, .rank = -1, .payload = encode(failure)});
  if (options_.local_ranks == 0) return;
  if (started_)
    push(Failed{std::move(failure)});
  else
    push(Finish{.status = 1, .why = failure.text()});
}

void Agent::Loop::head_unreachable(const std::string& why, bool configuration) {
  failed_ = true;
  if (configuration) deliver({.kind = Kind::refused, .rank = -1, .payload = why});
  Failure failure;
  failure.cause = why;
  deliver({.kind = Kind::verdict, .rank = -1, .payload = encode(failure)});
  refusal_ = why;
  if (options_.local_ranks > 0) push(Finish{.status = 1, .why = why});
}

// Runs on its own thread, because connecting may block. Retries until the coordinator answers or the time is
// over.
void Agent::Loop::connect_to_head() {
  const Link& link = *options_.link;
  const auto deadline = Clock::now() + options_.join_timeout;
  std::string trouble = "no answer";
  int unproven = 0;
  bool told = options_.local_ranks == 0;  // Waiting ranks report it themselves.
  while (!ending_ && Clock::now() < deadline && unproven < 3) {
    int answered = 0;
    for (int port = link.port; port <= link.last_port && !ending_; ++port) {
      try {
        auto fd = connect_tcp(link.address, port, milliseconds(1000));
        ++answered;
        auto secure = std::make_unique<SecureLink>(SecureLink::Side::caller, link.key, link.job);
        const auto limit = Clock::now() + milliseconds(1500);
        char bytes[256];
        while (!secure->proven()) {
          auto out = secure->take_output();
          if (!flush(fd.get(), out)) throw FrameError("the connection was lost");
          pollfd readable{fd.get(), POLLIN, 0};
          ::poll(&readable, 1, 100);
          if (Clock::now() > limit) throw FrameError("no answer");
          const auto n = ::recv(fd.get(), bytes, sizeof bytes, MSG_DONTWAIT);
          if (n == 0)
            throw FrameError("it closed the connection: it has another key or belongs to another job");
          if (n > 0) secure->receive({bytes, static_cast<std::size_t>(n)});
        }
        auto shared = std::make_shared<Node>();
        shared->from = fmt::format("{}:{}", link.address, port);
        shared->out = secure->take_output();
        own_address_ = local_address_of(fd.get());
        shared->fd = std::move(fd);
        shared->link = std::move(secure);
        post([this, shared] {
          nodes_.push_back(std::move(*shared));
          Node& coordinator = nodes_.back();
          coordinator.heard = Clock::now();
          send(coordinator, {.kind = Kind::node_hello,
                             .payload = NodeHello{.node = options_.local_ranks > 0 ? options_.node : -1,
                                                  .num_nodes = options_.num_nodes,
                                                  .local_ranks = options_.local_ranks,
                                                  .agent_rank = agent_rank_,
                                                  .agent_pid = ::getpid(),
                                                  .version = kVersion,
                                                  .address = own_address_}
                                            .encode()});
          for (auto& frame : unsent_) send(coordinator, frame);
          unsent_.clear();
          serve(coordinator);
        });
        return;
      } catch (const ConfigError& error) {
        trouble = error.what();                // The name may become resolvable.
      } catch (const std::exception& error) {  // An invalid frame, or no descriptors left.
        trouble = error.what();
      }
    }
    // On a range of ports another job may have the first one, and the coordinator may still take the next.
    if (answered > link.last_port - link.port) ++unproven;
    if (!told && Clock::now() > deadline - options_.join_timeout + milliseconds(1000)) {
      told = true;
      options_.say(fmt::format("node {} of {} waits for node 0 at {}:{}", options_.node, options_.num_nodes,
                               link.address, link.port));
    }
    std::this_thread::sleep_for(milliseconds(answered > 0 ? 300 : 50));
  }
  if (ending_) return;
  post([this, trouble, unproven] {
    const Link& where = *options_.link;
    head_unreachable(fmt::format("cannot reach the coordinator of the job at {}:{}: {}", where.address,
                                 where.port, trouble),
                     unproven >= 3);
  });
}

}  // namespace lockstep::control

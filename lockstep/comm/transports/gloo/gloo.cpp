// The gloo transport: LibTorch's own Gloo. CPU tensors, TCP.
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <future>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

#include <fmt/format.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/log.h>
#include <lockstep/base/start_thread.h>
#include <lockstep/comm/c10d/store.h>
#include <lockstep/comm/c10d/transport.h>
#include <lockstep/comm/reduce/reduce.h>
#include <lockstep/comm/transports/gloo/engine/sockets.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace lockstep::detail {
namespace {

using Gloo = c10d::ProcessGroupGloo;

std::shared_ptr<::gloo::transport::Device> make_device(const TransportContext& context) {
  // PyTorch's variable for the network interface.
  if (auto interface = env::text("GLOO_SOCKET_IFNAME")) return Gloo::createDeviceForInterface(*interface);
  return Gloo::createDeviceForHostname(context.address.empty() ? "127.0.0.1" : context.address);
}

// Gloo writes to its sockets without MSG_NOSIGNAL, so a lost peer would kill this process with SIGPIPE before
// the loss could be reported. A handler that the program installed stays.
void survive_broken_connections() {
  struct sigaction current {};
  if (::sigaction(SIGPIPE, nullptr, &current) == 0 && current.sa_handler == SIG_DFL)
    ::signal(SIGPIPE, SIG_IGN);
}

class GlooTransport final : public Transport {
 public:
  explicit GlooTransport(const TransportContext& context) {
    survive_broken_connections();
    auto options = Gloo::Options::create(context.timeout);
    const auto before = tcp_sockets();
    const auto listener = add_device(context, *options);
    options->threads = 2;
    options->group_name = context.group;
    backend_ = connect(context, options);
    find_connections(context, listener, before);
  }

  // A half-written send is not woken when its connection ends, and neither is a collective that waits for
  // one. reduce_scatter is an all-reduce of a copy that completes only in wait().
  Traits traits() const override {
    return {.reduce_scatter = false, .completes_unwatched = false, .wakes_waiters = false};
  }
  c10d::Backend& backend() override { return *backend_; }

  bool reduces(Dtype dtype, ReduceOp op) const override {
    return reducible(dtype, op) && dtype != Dtype::int16;
  }

  // Backend::abort() wakes no waiter in Gloo, and its destructor waits for the whole timeout. Shutting down
  // the connections wakes all waiters. Never shut down the listener: Gloo terminates the process then.
  void interrupt(const std::string&, CommError::Kind) noexcept override {
    for (const Connection& connection : connections_) shut_down(connection.socket);
  }

  // Reports a peer only some time after its connection ended, when everything that it sent has been read.
  std::vector<int> lost_peers() override {
    std::lock_guard lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    std::vector<int> lost;
    for (Connection& connection : connections_) {
      if (!connection.closed && has_ended(connection.socket)) connection.closed = now;
      if (connection.closed && now - *connection.closed > std::chrono::milliseconds(500))
        lost.push_back(connection.rank);
    }
    return lost;
  }

 private:
  struct Connection {
    TcpSocket socket;
    int rank = 0;
    std::optional<std::chrono::steady_clock::time_point> closed = {};
  };

  // On a separate thread: Gloo waits for each peer to connect, for as long as an operation may take, and
  // cannot be woken. If the job fails meanwhile, that thread is abandoned.
  static c10::intrusive_ptr<Gloo> connect(const TransportContext& context,
                                          const c10::intrusive_ptr<Gloo::Options>& options) {
    auto task = std::make_shared<std::packaged_task<c10::intrusive_ptr<Gloo>()>>(
        [store = context.store, rank = context.rank, size = context.size(), options] {
          return c10::make_intrusive<Gloo>(store, rank, size, options);
        });
    auto connected = task->get_future();
    start_thread("connecting gloo", [task] { (*task)(); }).detach();
    while (connected.wait_for(std::chrono::milliseconds(20)) != std::future_status::ready)
      if (context.failed && context.failed() &&
          connected.wait_for(std::chrono::milliseconds(200)) != std::future_status::ready)
        throw Error("it was interrupted");
    return connected.get();
  }

  // Each group has its own device and so its own listener. To find it, look for the new one: devices are made
  // one at a time, and making one needs no peer.
  static std::string add_device(const TransportContext& context, Gloo::Options& options) {
    static std::mutex one_at_a_time;
    std::lock_guard lock(one_at_a_time);
    const auto before = tcp_sockets();
    options.devices.push_back(make_device(context));
    for (const TcpSocket& socket : tcp_sockets())
      if (socket.listens && std::find(before.begin(), before.end(), socket) == before.end())
        return socket.local;
    return {};
  }

  // Finds Gloo's sockets and their peers: a connection that we made ends at a peer's listener; one that we
  // accepted comes from the address that the peer published. Sockets that existed before are skipped, because
  // interrupt() would end another group's connections.
  void find_connections(const TransportContext& context, const std::string& listener,
                        const std::vector<TcpSocket>& before) {
    auto publish = [&](const char* what, const std::string& text) {
      put(*context.store, fmt::format("gloo {}/{}", what, context.rank), text);
    };
    auto read = [&](const char* what, int rank) {
      return take(*context.store, fmt::format("gloo {}/{}", what, rank));
    };
    publish("listener", listener);
    std::map<std::string, int> rank_of_listener;
    for (int r = 0; r < context.size(); ++r)
      if (r != context.rank) rank_of_listener[read("listener", r)] = r;

    std::vector<TcpSocket> sockets;
    for (TcpSocket& socket : tcp_sockets())
      if (!socket.listens && !socket.peer.empty() &&
          std::find(before.begin(), before.end(), socket) == before.end())
        sockets.push_back(std::move(socket));
    std::string calls;  // "from rank from rank ..."
    for (const TcpSocket& socket : sockets) {
      auto target = rank_of_listener.find(socket.peer);
      if (target == rank_of_listener.end()) continue;
      connections_.push_back({socket, target->second});
      calls += fmt::format("{} {} ", socket.local, target->second);
    }
    publish("calls", calls);
    for (int r = 0; r < context.size(); ++r) {
      if (r == context.rank) continue;
      std::istringstream in(read("calls", r));
      std::string from;
      for (int target = 0; in >> from >> target;)
        for (const TcpSocket& socket : sockets)
          if (target == context.rank && socket.local == listener && socket.peer == from)
            connections_.push_back({socket, r});
    }
    if (connections_.size() + 1 < context.ranks.size())
      log(LogLevel::warn, "gloo: found {} of {} connections; a failure may be noticed only at the deadline",
          connections_.size(), context.size() - 1);
  }

  c10::intrusive_ptr<Gloo> backend_;
  std::mutex mutex_;
  std::vector<Connection> connections_;
};

}  // namespace

std::unique_ptr<Transport> make_gloo_transport(const TransportContext& context) {
  return std::make_unique<GlooTransport>(context);
}

}  // namespace lockstep::detail

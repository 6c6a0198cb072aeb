// LibTorch's own Gloo as a transport. CPU tensors, TCP.
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>

#include <fmt/format.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/log.h>
#include <lockstep/comm/reduce.h>
#include <lockstep/comm/store.h>
#include <lockstep/comm/transport.h>
#include <lockstep/comm/transports/gloo/sockets.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace lockstep::detail {
namespace {

using Gloo = c10d::ProcessGroupGloo;

std::shared_ptr<::gloo::transport::Device> make_device(const TransportContext& context) {
  // PyTorch's variable for the interface, as its users know it.
  if (auto interface = env::text("GLOO_SOCKET_IFNAME")) return Gloo::createDeviceForInterface(*interface);
  return Gloo::createDeviceForHostname(context.address.empty() ? "127.0.0.1" : context.address);
}

// Gloo writes to its sockets without MSG_NOSIGNAL: a peer that is gone would end this process by SIGPIPE
// before anybody could report it. A handler of the program's own is left alone.
void survive_broken_connections() {
  struct sigaction current {};
  if (::sigaction(SIGPIPE, nullptr, &current) == 0 && current.sa_handler == SIG_DFL)
    ::signal(SIGPIPE, SIG_IGN);
}

class GlooTransport final : public Transport {
 public:
  explicit GlooTransport(const TransportContext& context) {
    survive_broken_connections();
    const auto before = tcp_sockets();
    auto options = Gloo::Options::create(context.timeout);
    options->devices.push_back(make_device(context));
    options->threads = 2;
    options->group_name = context.group;
    backend_ = c10::make_intrusive<Gloo>(context.store, context.rank, context.size(), options);
    find_connections(context, before);
  }

  // A send that is half written is not woken when its connection ends, and neither is a collective that
  // waits for one. Its reduce_scatter is an all-reduce of a copy that completes only in wait().
  Traits traits() const override {
    return {.reduce_scatter = false, .completes_unwatched = false, .wakes_waiters = false};
  }
  c10d::Backend& backend() override { return *backend_; }

  bool reduces(Dtype dtype, ReduceOp op) const override {
    return reducible(dtype, op) && dtype != Dtype::int16;
  }

  // Backend::abort() wakes nobody who waits in Gloo, and its destructor sits out the time limit; a
  // connection that ends wakes everybody. Never the listener: Gloo ends the process when that goes.
  void interrupt(const std::string&) noexcept override {
    for (const TcpSocket& socket : connections_) shut_down(socket);
  }

 private:
  // Which sockets are Gloo's: those made meanwhile whose one end is the port of a rank's listener. The
  // program's other threads may open sockets at the same time, so "new" alone would not do.
  void find_connections(const TransportContext& context, const std::vector<TcpSocket>& before) {
    auto after = tcp_sockets();
    std::erase_if(after, [&](const TcpSocket& socket) {
      return std::find(before.begin(), before.end(), socket) != before.end();
    });
    std::string mine;
    for (const TcpSocket& socket : after)
      if (socket.listens) mine += fmt::format("{} ", socket.local_port);
    put(*context.store, fmt::format("gloo listener/{}", context.rank), mine);
    std::set<int> ports;
    for (int r = 0; r < context.size(); ++r) {
      auto text = take(*context.store, fmt::format("gloo listener/{}", r));
      for (const char* at = text.c_str(); *at != '\0';) {
        char* end = nullptr;
        ports.insert(static_cast<int>(std::strtol(at, &end, 10)));
        at = end + std::strspn(end, " ");
      }
    }
    for (const TcpSocket& socket : after)
      if (!socket.listens && (ports.contains(socket.local_port) || ports.contains(socket.peer_port)))
        connections_.push_back(socket);
    if (connections_.size() + 1 < context.ranks.size())
      log(LogLevel::warn, "gloo: found {} of {} connections; a failure may be noticed only at the deadline",
          connections_.size(), context.size() - 1);
  }

  c10::intrusive_ptr<Gloo> backend_;
  std::vector<TcpSocket> connections_;
};

}  // namespace

std::unique_ptr<Transport> make_gloo_transport(const TransportContext& context) {
  return std::make_unique<GlooTransport>(context);
}

}  // namespace lockstep::detail

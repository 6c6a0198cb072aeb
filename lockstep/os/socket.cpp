#include <lockstep/os/socket.h>

#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include <fmt/format.h>

namespace lockstep::control {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kUserTimeout{1500};  // Data unacknowledged for that long: the other host is gone.

std::string reason(int error) { return std::strerror(error); }

// Errors are ignored: a broken connection reports them when it is used.
void set_option(int fd, int level, int name, int value) noexcept {
  ::setsockopt(fd, level, name, &value, sizeof value);
}

void set_tcp_options(int fd) noexcept {
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(kUserTimeout.count()));
}

// ---- unix -----------------------------------------------------------------------------------------------

struct LocalAddress {
  sockaddr_un address{};
  socklen_t length = 0;

  explicit LocalAddress(const std::string& name) {
    // A first byte of 0 makes the name abstract; the length is part of it.
    if (name.empty() || name.size() > sizeof address.sun_path - 1)
      throw ConfigError(fmt::format("socket name '{}': expected 1 to {} bytes, got {}", name,
                                    sizeof address.sun_path - 1, name.size()));
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

Fd new_socket(int family, int flags) {
  Fd fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | flags, 0));
  if (!fd) throw Error("cannot create a socket: " + reason(errno));
  fd.close_in_children();
  return fd;
}

// ---- addresses ------------------------------------------------------------------------------------------

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

Addresses resolve(const std::string& address, int port) {
  if (address.empty()) throw ConfigError("empty address: expected the name or address of a host");
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  const int problem = ::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (problem == 0) return {found, &::freeaddrinfo};
  const auto text = fmt::format("cannot resolve '{}': {}", address, ::gai_strerror(problem));
  if (problem == EAI_AGAIN) throw ConnectError(text);
  throw ConfigError(text);
}

std::string number_of(const sockaddr* address, socklen_t length) {
  char host[NI_MAXHOST] = "";
  if (::getnameinfo(address, length, host, sizeof host, nullptr, 0, NI_NUMERICHOST) != 0) return {};
  return host;
}

struct AnyAddress {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&address); }
};

std::string address_of(int fd, int (*ask)(int, sockaddr*, socklen_t*)) {
  AnyAddress address;
  return ask(fd, address.get(), &address.length) == 0 ? number_of(address.get(), address.length)
                                                      : std::string();
}

int port_of(const sockaddr* address) {
  return ntohs(address->sa_family == AF_INET ? reinterpret_cast<const sockaddr_in*>(address)->sin_port
                                             : reinterpret_cast<const sockaddr_in6*>(address)->sin6_port);
}

std::string with_port(const std::string& address, const std::string& port) {
  return (address.find(':') == std::string::npos ? address : "[" + address + "]") + ":" + port;
}

// The bytes that identify an address; for IPv4 inside IPv6 those of IPv4.
std::string_view bytes_of(const sockaddr* address) {
  if (address->sa_family == AF_INET)
    return {reinterpret_cast<const char*>(&reinterpret_cast<const sockaddr_in*>(address)->sin_addr), 4};
  if (address->sa_family != AF_INET6) return {};
  const auto& six = reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
  const std::string_view bytes(reinterpret_cast<const char*>(&six), sizeof six);
  return IN6_IS_ADDR_V4MAPPED(&six) ? bytes.substr(12) : bytes;
}

bool is_wildcard(const sockaddr* address) {
  return bytes_of(address).find_first_not_of('\0') == std::string_view::npos;
}

bool is_loopback(const sockaddr* address) {
  const auto bytes = bytes_of(address);
  if (bytes.size() == 4) return bytes[0] == 127;
  return address->sa_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

bool is_of_this_host(const sockaddr* address) {
  const auto bytes = bytes_of(address);
  // All of 127.0.0.0/8 is local, although only one address is listed.
  if (bytes.size() == 4 && bytes[0] == 127) return true;
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) throw Error("cannot list the network interfaces: " + reason(errno));
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(all, &::freeifaddrs);
  for (const auto* one = all; one; one = one->ifa_next)
    if (one->ifa_addr && !bytes.empty() && bytes_of(one->ifa_addr) == bytes) return true;
  return false;
}

// False if the port is in use. If two sockets bind the same port before either listens, listen() fails.
bool bind_and_listen(int fd, const sockaddr* address, socklen_t length) {
  if (::bind(fd, address, length) == 0 && ::listen(fd, SOMAXCONN) == 0) return true;
  if (errno == EADDRINUSE) return false;
  throw ConfigError(fmt::format("cannot listen at {}: {}",
                                with_port(number_of(address, length), std::to_string(port_of(address))),
                                reason(errno)));
}

// Waits until the deadline for a connection in progress. Returns 0 or an errno.
int finish_connect(int fd, steady_clock::time_point deadline) {
  for (;;) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now());
    pollfd poll{fd, POLLOUT, 0};
    const int ready = left.count() > 0 ? ::poll(&poll, 1, static_cast<int>(left.count())) : 0;
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return ready < 0 ? errno : ETIMEDOUT;
    int error = 0;
    socklen_t length = sizeof error;
    return ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 ? error : errno;
  }
}

// A connection to an unused local port may be assigned that very port as its source, and then connects to
// itself.
bool is_its_own_peer(int fd) {
  AnyAddress here, there;
  if (::getsockname(fd, here.get(), &here.length) != 0) return false;
  if (::getpeername(fd, there.get(), &there.length) != 0) return false;
  return port_of(here.get()) == port_of(there.get()) && bytes_of(here.get()) == bytes_of(there.get());
}

}  // namespace

// ---- forks ----------------------------------------------------------------------------------------------

namespace {

std::atomic<unsigned> forks = 1;  // Forks of this process and its ancestors.
// One bit per descriptor that is closed in children. Descriptors beyond the array stay open there.
std::array<std::atomic<std::uint64_t>, 1024> kept_from_children;

std::atomic<std::uint64_t>* bits_of(int fd) noexcept {
  const auto word = static_cast<std::size_t>(fd) / 64;
  return fd >= 0 && word < kept_from_children.size() ? &kept_from_children[word] : nullptr;
}
std::uint64_t bit_of(int fd) noexcept { return std::uint64_t{1} << (static_cast<unsigned>(fd) % 64); }

// Runs in a child: other threads may have held any lock at the fork, so it uses only atomics and close().
void close_parents_descriptors() noexcept {
  forks.fetch_add(1, std::memory_order_relaxed);
  for (std::size_t word = 0; word < kept_from_children.size(); ++word) {
    auto bits = kept_from_children[word].exchange(0, std::memory_order_relaxed);
    for (; bits != 0; bits &= bits - 1) ::close(static_cast<int>(word) * 64 + __builtin_ctzll(bits));
  }
}

}  // namespace

bool Fd::is_here() const noexcept {
  return process_ == 0 || process_ == forks.load(std::memory_order_relaxed);
}

void Fd::close_in_children() noexcept {
  [[maybe_unused]] static const int registered =
      ::pthread_atfork(nullptr, nullptr, &close_parents_descriptors);
  auto* bits = bits_of(fd_);
  if (!bits) return;
  process_ = forks.load(std::memory_order_relaxed);
  bits->fetch_or(bit_of(fd_), std::memory_order_relaxed);
}

int Fd::release() noexcept {
  const int fd = get();
  if (process_ != 0 && fd >= 0) bits_of(fd)->fetch_and(~bit_of(fd), std::memory_order_relaxed);
  fd_ = -1;
  process_ = 0;
  return fd;
}

void Fd::reset(int fd) noexcept {
  if (const int old = release(); old >= 0) ::close(old);
  fd_ = fd;
}

std::optional<Fd> listen_local(const std::string& name) {
  const LocalAddress address(name);
  Fd fd = new_socket(AF_UNIX, SOCK_NONBLOCK);
  if (::bind(fd.get(), address.get(), address.length) != 0) {
    if (errno == EADDRINUSE) return std::nullopt;
    throw Error(fmt::format("cannot create the local socket '{}': {}", name, reason(errno)));
  }
  if (::listen(fd.get(), SOMAXCONN) != 0)
    throw Error(fmt::format("cannot listen at the local socket '{}': {}", name, reason(errno)));
  return fd;
}

std::optional<Fd> accept_local(int listener) {
  Fd fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd) return std::nullopt;
  fd.close_in_children();
  return fd;
}

std::optional<Fd> connect_local(const std::string& name) {
  const LocalAddress address(name);
  // A nonblocking socket would be refused by a listener whose queue is full; this one waits a second.
  Fd fd = new_socket(AF_UNIX, 0);
  const timeval patience{1, 0};
  ::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  int status = 0;
  do status = ::connect(fd.get(), address.get(), address.length);
  while (status != 0 && errno == EINTR);
  if (status != 0) {
    if (errno == ECONNREFUSED || errno == EAGAIN) return std::nullopt;
    throw Error(fmt::format("cannot connect to the local socket '{}': {}", name, reason(errno)));
  }
  if (::fcntl(fd.get(), F_SETFL, O_NONBLOCK) != 0)
    throw Error("cannot make a socket nonblocking: " + reason(errno));
  return fd;
}

Peer peer_of(int fd) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0)
    throw Error("cannot determine the peer of a socket: " + reason(errno));
  return {credentials.pid, credentials.uid};
}

bool is_own(int fd) { return peer_of(fd).uid == ::geteuid(); }

bool send_with_fd(int socket, std::string_view bytes, int fd) {
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = CMSG_LEN(sizeof fd);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  ssize_t sent = 0;
  do sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
  while (sent < 0 && errno == EINTR);
  if (sent == static_cast<ssize_t>(bytes.size())) return true;
  if (sent < 0 && errno == EAGAIN) return false;
  // A partial send would have included the descriptor, and its rest would be mistaken for the next message.
  throw Error("cannot send a descriptor: " + (sent < 0 ? reason(errno) : std::string("the socket is full")));
}

std::optional<Received> receive_fd(int socket, std::span<char> into) {
  iovec part{into.data(), into.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = CMSG_LEN(sizeof(int));  // Room for one descriptor; the kernel closes further ones.
  ssize_t size = 0;
  do size = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  while (size < 0 && errno == EINTR);
  if (size < 0 && errno == EAGAIN) return std::nullopt;
  if (size < 0) throw Error("cannot read a local socket: " + reason(errno));
  Received received{static_cast<std::size_t>(size), Fd()};
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS &&
      header->cmsg_len == CMSG_LEN(sizeof(int))) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
    received.fd.reset(fd);
  }
  return received;
}

std::string TcpListener::text() const { return with_port(address, std::to_string(port)); }

TcpListener listen_tcp(const std::string& address, int first_port, int last_port) {
  if (first_port < 0 || last_port > 65535 || last_port < first_port)
    throw ConfigError(fmt::format("{}: expected a range of ports within 0 to 65535, got {} to {}", address,
                                  first_port, last_port));
  const auto found = resolve(address, first_port);
  const addrinfo* own = nullptr;
  for (const auto* one = found.get(); one; one = one->ai_next) {
    if (is_wildcard(one->ai_addr))
      throw ConfigError(
          fmt::format("'{}' means every interface of this host; use the address at which the other hosts "
                      "reach it",
                      address));
    // Many hosts resolve their own name to 127.0.1.1 first, which other hosts cannot reach.
    if (is_of_this_host(one->ai_addr) && (!own || (is_loopback(own->ai_addr) && !is_loopback(one->ai_addr))))
      own = one;
  }
  if (!own)
    throw ConfigError(
        fmt::format("'{}' ({}) is not an address of this host; use one at which the other hosts reach it",
                    address, number_of(found->ai_addr, found->ai_addrlen)));
  for (int port = first_port; port <= last_port; ++port) {
    AnyAddress bound;
    std::memcpy(bound.get(), own->ai_addr, own->ai_addrlen);
    if (own->ai_family == AF_INET)
      reinterpret_cast<sockaddr_in*>(bound.get())->sin_port = htons(static_cast<std::uint16_t>(port));
    else
      reinterpret_cast<sockaddr_in6*>(bound.get())->sin6_port = htons(static_cast<std::uint16_t>(port));
    TcpListener listener{new_socket(own->ai_family, SOCK_NONBLOCK), number_of(own->ai_addr, own->ai_addrlen),
                         0};
    set_option(listener.fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
    if (!bind_and_listen(listener.fd.get(), bound.get(), own->ai_addrlen)) continue;
    if (::getsockname(listener.fd.get(), bound.get(), &bound.length) != 0)
      throw Error("cannot determine the port of a socket: " + reason(errno));
    listener.port = port_of(bound.get());
    return listener;
  }
  const auto number = number_of(own->ai_addr, own->ai_addrlen);
  if (first_port == last_port)
    throw ConfigError(
        fmt::format("{} is in use by another job or program", with_port(number, std::to_string(first_port))));
  throw ConfigError(
      fmt::format("no free port in {}", with_port(number, fmt::format("{}-{}", first_port, last_port))));
}

std::optional<Fd> accept_tcp(int listener) {
  // Errors of a connection that has not been accepted say nothing about the next one.
  for (;;) {
    Fd fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd) {
      fd.close_in_children();
      set_tcp_options(fd.get());
      return fd;
    }
    const bool next = errno == EINTR || errno == ECONNABORTED || errno == EPROTO || errno == ENETDOWN ||
                      errno == EHOSTUNREACH || errno == ENETUNREACH || errno == EHOSTDOWN;
    if (!next) return std::nullopt;
  }
}

Fd connect_tcp(const std::string& address, int port, milliseconds timeout) {
  const auto deadline = steady_clock::now() + timeout;
  const auto found = resolve(address, port);
  int left = 0;
  for (const auto* one = found.get(); one; one = one->ai_next) ++left;
  std::string problems;
  for (const auto* one = found.get(); one; one = one->ai_next, --left) {
    // Each address gets a share of the time, because the first may never answer.
    const auto now = steady_clock::now();
    Fd fd(::socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    fd.close_in_children();
    int error = fd && ::connect(fd.get(), one->ai_addr, one->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) error = finish_connect(fd.get(), now + (deadline - now) / left);
    if (error == 0 && is_its_own_peer(fd.get())) error = ECONNREFUSED;
    if (error == 0) {
      set_tcp_options(fd.get());  // Only now: the user timeout would apply to connecting too.
      return fd;
    }
    if (!problems.empty()) problems += "; ";
    problems +=
        with_port(number_of(one->ai_addr, one->ai_addrlen), std::to_string(port)) + ": " + reason(error);
  }
  throw ConnectError(fmt::format("cannot connect to '{}': {}", address, problems));
}

bool acknowledged_within(int fd, milliseconds time) {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return false;
  return info.tcpi_state == TCP_ESTABLISHED && milliseconds(info.tcpi_last_ack_recv) <= time;
}

std::string local_address_of(int fd) { return address_of(fd, &::getsockname); }

std::string remote_address_of(int fd) { return address_of(fd, &::getpeername); }

bool is_local_address(const std::string& address) {
  const auto found = resolve(address, 0);
  for (const auto* one = found.get(); one; one = one->ai_next)
    if (is_of_this_host(one->ai_addr)) return true;
  return false;
}

}  // namespace lockstep::control

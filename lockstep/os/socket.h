// Sockets of the control plane. Every descriptor is nonblocking and closed on exec and in children.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <lockstep/base/error.h>

namespace lockstep::control {

// Owns a descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) noexcept : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)), process_(std::exchange(other.process_, 0)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this == &other) return *this;
    reset();
    fd_ = std::exchange(other.fd_, -1);
    process_ = std::exchange(other.process_, 0);
    return *this;
  }
  ~Fd() { reset(); }

  int get() const noexcept { return is_here() ? fd_ : -1; }
  explicit operator bool() const noexcept { return get() >= 0; }
  int release() noexcept;
  void reset(int fd = -1) noexcept;
  // Closes the descriptor in children of fork(), where the Fd is then empty. The peer learns of this
  // process's end by the end of the connection, which a copy in a surviving child would hide.
  void close_in_children() noexcept;

 private:
  bool is_here() const noexcept;

  int fd_ = -1;
  unsigned process_ = 0;  // Fork count when close_in_children() was called; 0: not called.
};

// ---- on one host ----------------------------------------------------------------------------------------
// Abstract unix sockets: a name in this network namespace instead of a file, so nothing is left behind. Any
// user may connect to one, or take a name first, so both sides check the peer's user (is_own).

// nullopt if the name is in use.
std::optional<Fd> listen_local(const std::string& name);
// nullopt if no connection waits; errno has the reason (EMFILE, ...).
std::optional<Fd> accept_local(int listener);
// nullopt if nothing listens there, or does not accept within a second.
std::optional<Fd> connect_local(const std::string& name);

struct Peer {
  pid_t pid = 0;
  uid_t uid = 0;
};
Peer peer_of(int fd);  // As the kernel recorded it when the peer connected or listened.
bool is_own(int fd);   // True if the peer is a process of this user.

// Sends one message with a descriptor; false if the socket is full.
bool send_with_fd(int socket, std::string_view bytes, int fd);
struct Received {
  std::size_t size = 0;  // 0: the peer has closed the connection.
  Fd fd;                 // Empty if these bytes came without one.
};
std::optional<Received> receive_fd(int socket, std::span<char> into);  // nullopt if nothing has arrived.

// ---- between hosts --------------------------------------------------------------------------------------

// No answer from the address, temporarily or permanently.
class ConnectError : public Error {
 public:
  using Error::Error;
};

struct TcpListener {
  Fd fd;
  std::string address;  // The numeric address that was bound.
  int port = 0;

  std::string text() const;  // "10.0.0.1:29400", "[fe80::1%eth0]:29400"
};

// Binds only this address, at the first free port of the range, or at any port if first_port is 0. Throws
// ConfigError for a wildcard address or one of another host, or if no port is free.
TcpListener listen_tcp(const std::string& address, int first_port, int last_port);
// nullopt if no connection waits; errno has the reason (EMFILE, ...).
std::optional<Fd> accept_tcp(int listener);

// Tries each address of the name. Throws ConfigError if the name is unknown, else ConnectError.
Fd connect_tcp(const std::string& address, int port, std::chrono::milliseconds timeout);

// True if the other host's kernel has acknowledged data within this time, whatever its processes do. Data
// must have been sent meanwhile.
bool acknowledged_within(int fd, std::chrono::milliseconds time);

std::string local_address_of(int fd);   // Numeric: "10.0.0.1".
std::string remote_address_of(int fd);  // Empty if the connection has no peer any more.

// Loopback, or an address of an interface of this network namespace.
bool is_local_address(const std::string& address);

}  // namespace lockstep::control

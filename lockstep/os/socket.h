// Sockets of the control plane. Every descriptor here is closed on exec and in children, and does not block.
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
  // A child of fork() does not keep it: there it is closed, and counts as none. The end of a connection is
  // how its other side learns that this process has ended, and a copy in a child that lives on would hide it.
  void close_in_children() noexcept;

 private:
  bool is_here() const noexcept;

  int fd_ = -1;
  unsigned process_ = 0;  // how many forks lay behind it when it was closed to children; 0: it is not
};

// ---- on one host ----------------------------------------------------------------------------------------
// An abstract unix socket: a name of this network namespace and no file, so nothing is left behind. Any user
// may connect to it, or take a name first: both sides ask whose the other end is (is_own).

// Nothing where the name is in use.
std::optional<Fd> listen_local(const std::string& name);
std::optional<Fd> accept_local(int listener);  // nothing where nobody waits; errno says why (EMFILE, ...)
// Nothing where nobody listens, or nobody has accepted for a second.
std::optional<Fd> connect_local(const std::string& name);

struct Peer {
  pid_t pid = 0;
  uid_t uid = 0;
};
Peer peer_of(int fd);  // as the kernel saw them when they connected or listened
bool is_own(int fd);   // the other end is a process of this user

// One message that has a descriptor with it; false where the socket is full for now.
bool send_with_fd(int socket, std::string_view bytes, int fd);
struct Received {
  std::size_t size = 0;  // 0: the other end has closed
  Fd fd;                 // none where none came with these bytes
};
std::optional<Received> receive_fd(int socket, std::span<char> into);  // nothing where nothing has come

// ---- between hosts --------------------------------------------------------------------------------------

// Nobody answers there, for now or for good.
class ConnectError : public Error {
 public:
  using Error::Error;
};

struct TcpListener {
  Fd fd;
  std::string address;  // the number that was bound
  int port = 0;

  std::string text() const;  // "10.0.0.1:29400", "[fe80::1%eth0]:29400"
};

// Binds this address and no other; the first free port of the range, or any where first_port is 0.
// ConfigError for an address that is not of this host or is all of them, and where no port is free.
TcpListener listen_tcp(const std::string& address, int first_port, int last_port);
std::optional<Fd> accept_tcp(int listener);  // nothing where nobody waits; errno says why (EMFILE, ...)

// Tries each address that the name has. ConfigError for a name that is of no host; else ConnectError.
Fd connect_tcp(const std::string& address, int port, std::chrono::milliseconds timeout);

// Whether the other host's kernel has acknowledged anything for so long, whatever its processes do. Something
// must have been sent meanwhile.
bool acknowledged_within(int fd, std::chrono::milliseconds time);

std::string local_address_of(int fd);   // a number: "10.0.0.1"
std::string remote_address_of(int fd);  // empty where there is none any longer

// Loopback, or an address of an interface of this network namespace.
bool is_local_address(const std::string& address);

}  // namespace lockstep::control

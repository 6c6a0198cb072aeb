// The TCP sockets of this process, as listed by the kernel.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::detail {

struct TcpSocket {
  int fd = -1;
  std::uint64_t inode = 0;  // distinguishes it from a later socket with the same descriptor
  bool listens = false;
  std::string local = {};  // "address:port", because ports alone repeat across hosts
  std::string peer = {};   // empty: not connected

  bool operator==(const TcpSocket&) const = default;
};

std::vector<TcpSocket> tcp_sockets();

// True if the other end has closed it, or the descriptor no longer refers to this socket.
bool has_ended(const TcpSocket& socket) noexcept;

// Shuts down both directions if the descriptor still refers to this socket.
void shut_down(const TcpSocket& socket) noexcept;

}  // namespace lockstep::detail

// The TCP sockets of this process, as the kernel lists them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::detail {

struct TcpSocket {
  int fd = -1;
  std::uint64_t inode = 0;  // the same descriptor may be another socket later: the inode tells
  bool listens = false;
  std::string local = {};  // "address:port": ports alone are the same on many hosts
  std::string peer = {};   // empty: not connected

  bool operator==(const TcpSocket&) const = default;
};

std::vector<TcpSocket> tcp_sockets();

// Whether the other end has closed it, or it is no longer that socket.
bool has_ended(const TcpSocket& socket) noexcept;

// Both directions, if the descriptor is still that socket.
void shut_down(const TcpSocket& socket) noexcept;

}  // namespace lockstep::detail

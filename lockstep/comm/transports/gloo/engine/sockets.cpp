#include <lockstep/comm/transports/gloo/engine/sockets.h>

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <optional>

#include <fmt/format.h>

namespace lockstep::detail {
namespace {

// "" if it is neither IPv4 nor IPv6. An IPv4 address has the same text on both kinds of socket.
std::string text_of(const sockaddr_storage& address) {
  const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (address.ss_family == AF_INET) {
    ::inet_ntop(AF_INET, &v4.sin_addr, text.data(), text.size());
    return fmt::format("{}:{}", text.data(), ntohs(v4.sin_port));
  }
  if (address.ss_family != AF_INET6) return {};
  if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr))
    ::inet_ntop(AF_INET, &v6.sin6_addr.s6_addr[12], text.data(), text.size());
  else
    ::inet_ntop(AF_INET6, &v6.sin6_addr, text.data(), text.size());
  return fmt::format("{}:{}", text.data(), ntohs(v6.sin6_port));
}

std::optional<TcpSocket> look_at(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0 || !S_ISSOCK(status.st_mode)) return std::nullopt;
  TcpSocket socket{.fd = fd, .inode = status.st_ino};
  int type = 0, listens = 0;
  socklen_t length = sizeof type;
  if (::getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) != 0 || type != SOCK_STREAM) return std::nullopt;
  sockaddr_storage address{};
  length = sizeof address;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return std::nullopt;
  socket.local = text_of(address);
  if (socket.local.empty()) return std::nullopt;
  length = sizeof listens;
  ::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length);
  socket.listens = listens != 0;
  length = sizeof address;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0) socket.peer = text_of(address);
  return socket;
}

}  // namespace

std::vector<TcpSocket> tcp_sockets() {
  std::vector<TcpSocket> found;
  std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc/self/fd"), &::closedir);
  if (!folder) return found;
  while (const dirent* entry = ::readdir(folder.get())) {
    if (entry->d_name[0] == '.') continue;
    if (auto socket = look_at(std::atoi(entry->d_name))) found.push_back(*socket);
  }
  return found;
}

namespace {

bool is_still(const TcpSocket& socket) noexcept {
  struct stat status {};
  return ::fstat(socket.fd, &status) == 0 && status.st_ino == socket.inode;
}

}  // namespace

bool has_ended(const TcpSocket& socket) noexcept {
  if (!is_still(socket)) return true;
  pollfd look{socket.fd, POLLRDHUP, 0};
  return ::poll(&look, 1, 0) > 0 && (look.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

void shut_down(const TcpSocket& socket) noexcept {
  if (is_still(socket)) ::shutdown(socket.fd, SHUT_RDWR);
}

}  // namespace lockstep::detail

#include <lockstep/comm/transports/gloo/engine/sockets.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>
#include "support/errors.h"

namespace lockstep::testing {
namespace {

using detail::tcp_sockets;
using detail::TcpSocket;

TcpSocket found(const std::vector<TcpSocket>& all, int fd) {
  auto at = std::find_if(all.begin(), all.end(), [&](const TcpSocket& socket) { return socket.fd == fd; });
  return at == all.end() ? TcpSocket{} : *at;
}

int listener_on_loopback(sockaddr_in& address) {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  EXPECT_EQ(::bind(listener, reinterpret_cast<sockaddr*>(&address), length), 0);
  EXPECT_EQ(::listen(listener, 2), 0);
  EXPECT_EQ(::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length), 0);
  return listener;
}

TEST(Sockets, the_process_finds_its_own_and_shuts_down_one_of_them) {
  sockaddr_in address;
  const int listener = listener_on_loopback(address), client = ::socket(AF_INET, SOCK_STREAM, 0);
  ASSERT_EQ(::connect(client, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  const int server = ::accept(listener, nullptr, nullptr);

  const auto all = tcp_sockets();
  auto find = [&](int fd) { return found(all, fd); };
  const auto where = fmt::format("127.0.0.1:{}", ntohs(address.sin_port));
  EXPECT_TRUE(find(listener).listens);
  EXPECT_EQ(find(listener).local, where);
  EXPECT_EQ(find(listener).peer, "");
  EXPECT_FALSE(find(server).listens);
  EXPECT_EQ(find(server).local, where);
  EXPECT_EQ(find(server).peer, find(client).local);
  EXPECT_EQ(find(client).peer, where);

  // Not a socket that has since taken over the descriptor.
  TcpSocket stale = find(client);
  stale.inode += 1;
  detail::shut_down(stale);
  char byte = 'x';
  EXPECT_EQ(::send(client, &byte, 1, MSG_NOSIGNAL), 1);
  EXPECT_EQ(::recv(server, &byte, 1, 0), 1);

  detail::shut_down(find(client));
  EXPECT_EQ(::recv(server, &byte, 1, 0), 0);
  for (int fd : {listener, client, server}) ::close(fd);
}

TEST(Sockets, an_IPv4_address_is_the_same_through_IPv6) {
  const int caller = ::socket(AF_INET6, SOCK_STREAM, 0);
  if (caller < 0) GTEST_SKIP() << "this system has no IPv6: " << std::strerror(errno);
  sockaddr_in address;
  const int listener = listener_on_loopback(address);
  sockaddr_in6 mapped{};
  mapped.sin6_family = AF_INET6;
  mapped.sin6_port = address.sin_port;
  ASSERT_EQ(::inet_pton(AF_INET6, "::ffff:127.0.0.1", &mapped.sin6_addr), 1);
  ASSERT_EQ(::connect(caller, reinterpret_cast<sockaddr*>(&mapped), sizeof mapped), 0)
      << std::strerror(errno);
  EXPECT_EQ(found(tcp_sockets(), caller).peer, fmt::format("127.0.0.1:{}", ntohs(address.sin_port)));
  for (int fd : {listener, caller}) ::close(fd);
}

}  // namespace
}  // namespace lockstep::testing

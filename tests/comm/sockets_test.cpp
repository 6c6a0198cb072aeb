#include <lockstep/comm/transports/gloo/sockets.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

#include <fmt/format.h>
#include "support/errors.h"

namespace lockstep::testing {
namespace {

using detail::tcp_sockets;
using detail::TcpSocket;

TEST(Sockets, the_process_finds_its_own_and_shuts_down_one_of_them) {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0), client = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  ASSERT_EQ(::bind(listener, reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(::listen(listener, 2), 0);
  ASSERT_EQ(::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length), 0);
  ASSERT_EQ(::connect(client, reinterpret_cast<sockaddr*>(&address), length), 0);
  const int server = ::accept(listener, nullptr, nullptr);
  // The same server, called through the other protocol: the address is still the IPv4 one.
  const int caller = ::socket(AF_INET6, SOCK_STREAM, 0);
  sockaddr_in6 mapped{};
  mapped.sin6_family = AF_INET6;
  mapped.sin6_port = address.sin_port;
  ASSERT_EQ(::inet_pton(AF_INET6, "::ffff:127.0.0.1", &mapped.sin6_addr), 1);
  ASSERT_EQ(::connect(caller, reinterpret_cast<sockaddr*>(&mapped), sizeof mapped), 0);

  const auto all = tcp_sockets();
  auto find = [&](int fd) {
    auto found =
        std::find_if(all.begin(), all.end(), [&](const TcpSocket& socket) { return socket.fd == fd; });
    return found == all.end() ? TcpSocket{} : *found;
  };
  const auto where = fmt::format("127.0.0.1:{}", ntohs(address.sin_port));
  EXPECT_TRUE(find(listener).listens);
  EXPECT_EQ(find(listener).local, where);
  EXPECT_EQ(find(listener).peer, "");
  EXPECT_FALSE(find(server).listens);
  EXPECT_EQ(find(server).local, where);
  EXPECT_EQ(find(server).peer, find(client).local);
  EXPECT_EQ(find(client).peer, where);
  EXPECT_EQ(find(caller).peer, where);

  // Not what has taken the descriptor's place since.
  TcpSocket stale = find(client);
  stale.inode += 1;
  detail::shut_down(stale);
  char byte = 'x';
  EXPECT_EQ(::send(client, &byte, 1, MSG_NOSIGNAL), 1);
  EXPECT_EQ(::recv(server, &byte, 1, 0), 1);

  detail::shut_down(find(client));
  EXPECT_EQ(::recv(server, &byte, 1, 0), 0);
  for (int fd : {listener, client, caller, server}) ::close(fd);
}

}  // namespace
}  // namespace lockstep::testing

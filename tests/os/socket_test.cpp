#include <lockstep/os/socket.h>

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

using namespace std::chrono_literals;
using namespace control;

std::string fresh_name() {
  return "lockstep-test-" + std::to_string(::getpid()) + "-" + std::to_string(::rand());
}

void expect_well_kept(int fd) {
  EXPECT_TRUE(::fcntl(fd, F_GETFD) & FD_CLOEXEC);
  EXPECT_TRUE(::fcntl(fd, F_GETFL) & O_NONBLOCK);
}

int option(int fd, int name) {
  int value = 0;
  socklen_t length = sizeof value;
  EXPECT_EQ(::getsockopt(fd, IPPROTO_TCP, name, &value, &length), 0);
  return value;
}

Fd accepted(int listener) {
  pollfd poll{listener, POLLIN, 0};
  ::poll(&poll, 1, 60000);
  auto fd = accept_tcp(listener);
  return fd ? std::move(*fd) : Fd();
}

TEST(Socket, a_descriptor_has_one_owner) {
  int pipe[2];
  ASSERT_EQ(::pipe2(pipe, O_CLOEXEC), 0);
  Fd one(pipe[0]), other(pipe[1]);
  Fd moved = std::move(one);
  EXPECT_FALSE(one);
  EXPECT_EQ(moved.get(), pipe[0]);
  moved = std::move(other);
  EXPECT_EQ(::fcntl(pipe[0], F_GETFD), -1);
  moved.reset();
  EXPECT_EQ(::fcntl(pipe[1], F_GETFD), -1);
}

TEST(Socket, local_ends_know_whose_the_other_is) {
  const auto name = fresh_name();
  EXPECT_FALSE(connect_local(name));
  auto listener = listen_local(name);
  ASSERT_TRUE(listener);
  EXPECT_FALSE(listen_local(name));
  EXPECT_FALSE(accept_local(listener->get()));
  const auto client = connect_local(name);
  ASSERT_TRUE(client);
  const auto server = accept_local(listener->get());
  ASSERT_TRUE(server);
  for (int fd : {listener->get(), client->get(), server->get()}) expect_well_kept(fd);
  for (int fd : {client->get(), server->get()}) {
    EXPECT_EQ(peer_of(fd).pid, ::getpid());
    EXPECT_EQ(peer_of(fd).uid, ::geteuid());
    EXPECT_TRUE(is_own(fd));
  }
  // The name is free once its listener is gone; it was never a file.
  listener.reset();
  EXPECT_TRUE(listen_local(name));
  EXPECT_NE(::access(name.c_str(), F_OK), 0);
}

TEST(Socket, another_user_is_told_apart_on_both_sides) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  const auto ours = fresh_name(), theirs = fresh_name();
  const auto listener = listen_local(ours);
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const pid_t stranger = ::fork();
  if (stranger == 0) {
    if (::setresuid(12345, 12345, 12345) != 0) ::_exit(1);
    const auto squatter = listen_local(theirs);
    const auto client = connect_local(ours);
    if (!squatter || !client || is_own(client->get())) ::_exit(1);
    if (::write(pipe[1], "x", 1) != 1) ::_exit(1);
    ::pause();
  }
  ::close(pipe[1]);
  char byte = 0;
  EXPECT_EQ(::read(pipe[0], &byte, 1), 1);
  const auto server = accept_local(listener->get()), client = connect_local(theirs);
  ASSERT_TRUE(server && client);
  for (int fd : {server->get(), client->get()}) {
    EXPECT_FALSE(is_own(fd));
    EXPECT_EQ(peer_of(fd).uid, 12345);
    EXPECT_EQ(peer_of(fd).pid, stranger);
  }
  ::close(pipe[0]);
  ::kill(stranger, SIGKILL);
  ::waitpid(stranger, nullptr, 0);
}

TEST(Socket, names_have_a_length) {
  EXPECT_THAT(error_of<ConfigError>([] { (void)listen_local(""); }), HasSubstr("1 to 107"));
  EXPECT_THAT(error_of<ConfigError>([] { (void)connect_local(std::string(108, 'x')); }),
              HasSubstr("1 to 107"));
  EXPECT_TRUE(listen_local(fresh_name() + std::string(60, 'x')));
}

TEST(Socket, descriptors_travel_with_bytes) {
  int ends[2], pipe[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
  ASSERT_EQ(::pipe2(pipe, O_CLOEXEC), 0);
  Fd here(ends[0]), there(ends[1]), read_end(pipe[0]), write_end(pipe[1]);
  std::array<char, 16> bytes{};
  EXPECT_FALSE(receive_fd(there.get(), bytes));

  ASSERT_TRUE(send_with_fd(here.get(), "take", write_end.get()));
  auto received = receive_fd(there.get(), bytes);
  ASSERT_TRUE(received && received->fd);
  EXPECT_EQ(std::string(bytes.data(), received->size), "take");
  EXPECT_TRUE(::fcntl(received->fd.get(), F_GETFD) & FD_CLOEXEC);
  write_end.reset();
  EXPECT_EQ(::write(received->fd.get(), "x", 1), 1);
  EXPECT_EQ(::read(read_end.get(), bytes.data(), 1), 1);

  EXPECT_EQ(::send(here.get(), "none", 4, 0), 4);
  received = receive_fd(there.get(), bytes);
  ASSERT_TRUE(received);
  EXPECT_FALSE(received->fd);
  EXPECT_EQ(received->size, 4);
  here.reset();
  received = receive_fd(there.get(), bytes);
  ASSERT_TRUE(received);
  EXPECT_EQ(received->size, 0);
  EXPECT_THROW(send_with_fd(there.get(), "x", read_end.get()), Error);
}

TEST(Socket, tcp_binds_the_one_address) {
  const auto listener = listen_tcp("127.0.0.3", 0, 0);
  EXPECT_EQ(listener.address, "127.0.0.3");
  EXPECT_GT(listener.port, 0);
  EXPECT_EQ(listener.text(), "127.0.0.3:" + std::to_string(listener.port));
  EXPECT_EQ(local_address_of(listener.fd.get()), "127.0.0.3");
  expect_well_kept(listener.fd.get());

  const auto client = connect_tcp("127.0.0.3", listener.port, 60s);
  const auto server = accepted(listener.fd.get());
  ASSERT_TRUE(server);
  EXPECT_EQ(remote_address_of(client.get()), "127.0.0.3");
  EXPECT_EQ(remote_address_of(server.get()), local_address_of(client.get()));
  for (int fd : {client.get(), server.get()}) {
    expect_well_kept(fd);
    EXPECT_EQ(option(fd, TCP_NODELAY), 1);
    EXPECT_EQ(option(fd, TCP_USER_TIMEOUT), 1500);
  }
  EXPECT_FALSE(accept_tcp(listener.fd.get()));
  const auto text = error_of<ConnectError>([&] { (void)connect_tcp("127.0.0.1", listener.port, 60s); });
  EXPECT_THAT(text, AllOf(HasSubstr("127.0.0.1:" + std::to_string(listener.port)), HasSubstr("refused")));
}

TEST(Socket, tcp_takes_the_first_free_port) {
  const auto first = listen_tcp("127.0.0.1", 0, 0);
  const auto next = listen_tcp("127.0.0.1", first.port, std::min(first.port + 50, 65535));
  EXPECT_GT(next.port, first.port);
  EXPECT_THAT(error_of<ConfigError>([&] { listen_tcp("127.0.0.1", first.port, first.port); }),
              AllOf(HasSubstr("127.0.0.1:" + std::to_string(first.port)), HasSubstr("in use")));
  EXPECT_THAT(error_of<ConfigError>([&] { listen_tcp("localhost", -1, 5); }), HasSubstr("0 to 65535"));
  EXPECT_THAT(error_of<ConfigError>([&] { listen_tcp("127.0.0.1", 5000, 4999); }), HasSubstr("5000 to 4999"));
}

TEST(Socket, a_port_can_be_taken_again_at_once) {
  const std::string address = "127.0.0.4";  // Only this test uses it, so no other can take the port.
  int port = 0;
  {
    const auto listener = listen_tcp(address, 0, 0);
    port = listener.port;
    const auto client = connect_tcp(address, port, 60s);
    accepted(listener.fd.get()).reset();  // Closed here first: this side keeps the port in TIME_WAIT.
  }
  EXPECT_EQ(listen_tcp(address, port, port).port, port);
}

TEST(Socket, addresses_that_are_not_ours_are_refused) {
  for (const char* all : {"0.0.0.0", "::", "::ffff:0.0.0.0", "0"})
    EXPECT_THAT(error_of<ConfigError>([&] { listen_tcp(all, 0, 0); }),
                AllOf(HasSubstr(all), HasSubstr("every interface")));
  for (const char* other : {"192.0.2.7", "255.255.255.255", "224.0.0.1", "2001:db8::7"})
    EXPECT_THAT(error_of<ConfigError>([&] { listen_tcp(other, 0, 0); }),
                AllOf(HasSubstr(other), HasSubstr("not an address of this host")));
  EXPECT_THAT(error_of<ConfigError>([&] { listen_tcp("", 0, 0); }), HasSubstr("empty"));
}

TEST(Socket, local_addresses_are_known) {
  EXPECT_TRUE(is_local_address("127.0.0.1"));
  EXPECT_TRUE(is_local_address("127.8.9.1"));
  EXPECT_TRUE(is_local_address("localhost"));
  EXPECT_TRUE(is_local_address("::ffff:127.0.0.1"));
  EXPECT_FALSE(is_local_address("192.0.2.7"));
  EXPECT_FALSE(is_local_address("0.0.0.0"));
}

TEST(Socket, connecting_ends_at_its_deadline) {
  // The queue of a listener that accepts nothing fills up; then nothing answers.
  const Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(::listen(listener.get(), 0), 0);
  ASSERT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
  const int port = ntohs(address.sin_port);
  const auto held = connect_tcp("127.0.0.1", port, 60s);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(error_of<ConnectError>([&] { (void)connect_tcp("127.0.0.1", port, 200ms); }),
              HasSubstr("timed out"));
  EXPECT_GE(std::chrono::steady_clock::now() - begin, 200ms);
}

}  // namespace
}  // namespace lockstep::testing

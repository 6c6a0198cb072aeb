// Agents and ranks over real sockets, in one process.
#include <lockstep/control/agent/agent.h>

#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>

#include <future>
#include <thread>

#include "control/agent/agent_fixture.h"
#include "support/eventually.h"

namespace lockstep::control {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::error_of;
using testing::eventually;
using ::testing::HasSubstr;

// A bound port of 127.0.0.1 on which no process can listen.
class SilentPort {
 public:
  SilentPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    EXPECT_EQ(::bind(socket_.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
    EXPECT_EQ(::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
    port_ = ntohs(address.sin_port);
  }
  int number() const { return port_; }

 private:
  const Fd socket_;
  int port_ = 0;
};

TEST_F(AgentTest, ranks_meet_and_share_a_store) {
  Agent agent(options());
  std::vector<std::thread> ranks;
  std::atomic<int> sum = 0;
  for (int r = 0; r < 4; ++r)
    ranks.emplace_back([&, r] {
      auto client = connect(options().name);
      const auto welcome = client->join(card(r, 4), seconds(30), [](const Failure&) {});
      EXPECT_EQ(welcome.local_rank, r);
      const auto deadline = Clock::now() + seconds(30);
      client->ask({.call = StoreCall::set, .keys = {std::to_string(r)}, .values = {std::to_string(r)}},
                  deadline, never);
      const auto all =
          client->ask({.call = StoreCall::get, .keys = {"0", "1", "2", "3"}, .values = {}}, deadline, never);
      EXPECT_THAT(all.values, ElementsAre("0", "1", "2", "3"));
      sum += static_cast<int>(
          client->ask({.call = StoreCall::add, .keys = {"sum"}, .values = {}, .number = 1}, deadline, never)
              .number);
      client->leave();
    });
  for (auto& rank : ranks) rank.join();
  EXPECT_EQ(sum, 1 + 2 + 3 + 4);
  EXPECT_TRUE(eventually([&] { return agent.deserted(0); }));
}

TEST_F(AgentTest, a_second_agent_of_a_name_is_told) {
  Agent agent(options());
  EXPECT_THROW(Agent second(options()), NameInUse);
}

TEST_F(AgentTest, what_no_rank_sends_cuts_the_connection_and_nothing_else) {
  Agent agent(options());
  for (const std::string& bytes :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(100, '\xff'), encode({.kind = Kind::ping}),
        encode({.kind = Kind::store, .rank = 0, .payload = "?"}),
        encode({.kind = Kind::hello, .payload = Hello{.rank = 5, .size = 2, .pid = 1}.encode()})}) {
    auto socket = connect_local(options().name);
    ASSERT_TRUE(socket);
    ASSERT_EQ(::send(socket->get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
    char byte;
    pollfd readable{socket->get(), POLLIN, 0};
    while (::poll(&readable, 1, 30000) > 0 && ::recv(socket->get(), &byte, 1, MSG_DONTWAIT) > 0) {
    }
    EXPECT_TRUE(comes_to_say("closed the connection of process"));
  }
  auto client = connect(options().name);
  EXPECT_EQ(client->join(card(0, 1), seconds(30), [](const Failure&) {}).local_size, 1);
}

TEST_F(AgentTest, ranks_stop_at_the_same_call) {
  Agent agent(options());
  std::vector<std::thread> ranks;
  std::vector<int> calls(3);
  for (int r = 0; r < 3; ++r)
    ranks.emplace_back([&, r] {
      auto client = connect(options().name);
      client->join(card(r, 3), seconds(30), [](const Failure&) {});
      while (!client->stop_requested()) {
        if (++calls[static_cast<std::size_t>(r)] == 20 && r == 1) client->request_stop(SIGTERM);
        std::this_thread::sleep_for(milliseconds(1 + 3 * r));
      }
      client->leave();
    });
  for (auto& rank : ranks) rank.join();
  EXPECT_EQ(calls[0], calls[1]);
  EXPECT_EQ(calls[1], calls[2]);
  EXPECT_GE(calls[0], 20);
}

TEST_F(AgentTest, agents_of_two_hosts_are_one_job) {
  auto [coordinator, other] = two_hosts();
  std::promise<Failure> told;
  auto far = std::async(std::launch::async, [&] {
    auto client = connect(options("/other").name);
    client->join(card(1, 2), seconds(30), [](const Failure&) {});
    client->ask({.call = StoreCall::set, .keys = {"k"}, .values = {"far"}}, Clock::now() + seconds(30),
                never);
    return client;
  });
  auto client = connect(options("/head").name);
  const auto welcome =
      client->join(card(0, 2), seconds(30), [&](const Failure& failure) { told.set_value(failure); });
  EXPECT_THAT(welcome.nodes, ElementsAre(0, 1));
  EXPECT_EQ(welcome.local_size, 1);
  EXPECT_EQ(welcome.address, "127.0.0.1");
  EXPECT_THAT(
      client->ask({.call = StoreCall::get, .keys = {"k"}, .values = {}}, Clock::now() + seconds(30), never)
          .values,
      ElementsAre("far"));
  auto far_client = far.get();
  other.reset();  // The host is gone.
  EXPECT_THAT(told.get_future().get().text(),
              AllOf(HasSubstr("rank 1 (pid "), HasSubstr("and with it the agent of the host at 127.0.0.1")));
}

// The agent reads the hello before it notices the end of the connection, so the error names the rank. It
// waits 300 ms before it reports such an end, so the attempts run in parallel.
TEST_F(AgentTest, a_rank_that_dies_right_after_its_hello_ends_itself_alone) {
  std::vector<std::thread> rounds;
  for (int i = 0; i < 6; ++i)
    rounds.emplace_back([each = options("/" + std::to_string(i))] {
      Agent agent(each);
      {
        auto socket = connect_local(each.name);
        ASSERT_TRUE(socket);
        const auto hello = encode({.kind = Kind::hello, .payload = card(1, 2).encode()});
        ASSERT_EQ(::send(socket->get(), hello.data(), hello.size(), MSG_NOSIGNAL),
                  static_cast<ssize_t>(hello.size()));
      }
      auto client = connect(each.name);
      try {
        client->join(card(0, 2), seconds(30), [](const Failure&) {});
      } catch (const JoinError&) {  // Notified already.
      }
      const auto failure = client->failure(seconds(30));
      ASSERT_TRUE(failure);
      EXPECT_EQ(failure->rank, 1);
    });
  for (auto& round : rounds) round.join();
}

TEST_F(AgentTest, a_rank_without_a_board_cannot_claim_its_lock) {
  Agent agent(options());
  auto other = std::async(std::launch::async, [&] {
    auto client = connect(options().name);
    client->join(card(1, 2), seconds(30), [](const Failure&) {});
    return client;
  });
  auto client = connect(options().name);
  client->join(card(0, 2), seconds(30), [](const Failure&) {});
  auto second = other.get();
  for (int rank : {0, 5}) {
    auto socket = connect_local(options().name);
    ASSERT_TRUE(socket);
    auto bytes = encode({.kind = Kind::hello, .payload = card(rank, 6).encode()});
    for (int i = 0; i < 3; ++i) bytes += encode({.kind = Kind::attached, .rank = rank});
    ASSERT_EQ(::send(socket->get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
    char byte;
    pollfd readable{socket->get(), POLLIN, 0};
    EXPECT_GT(::poll(&readable, 1, 30000), 0) << "it is refused";
    EXPECT_GT(::recv(socket->get(), &byte, 1, MSG_DONTWAIT), 0);
  }
  client->ask({.call = StoreCall::set, .keys = {"k"}, .values = {"v"}}, Clock::now() + seconds(30), never);
  EXPECT_FALSE(client->failure(milliseconds(500)));
  client->leave();
  second->leave();
}

TEST_F(AgentTest, what_is_too_long_is_cut_or_refused_where_it_comes_from) {
  Agent agent(options());
  auto client = connect(options().name);
  client->join(card(0, 1), seconds(30), [](const Failure&) {});
  const auto deadline = Clock::now() + seconds(30);
  client->tell(GroupMade{.key = 1, .name = std::string(5000, 'g'), .ranks = {0}});
  EXPECT_THAT(error_of<Error>([&] {
                client->ask({.call = StoreCall::get, .keys = {std::string(5000, 'k')}, .values = {}},
                            deadline, never);
              }),
              HasSubstr("expected a key of at most 4096 bytes, got 5000"));
  EXPECT_THAT(error_of<Error>([&] {
                client->ask({.call = StoreCall::set, .keys = {"k"}, .values = {std::string(2 << 20, 'v')}},
                            deadline, never);
              }),
              HasSubstr("expected a request of at most"));
  EXPECT_EQ(
      client->ask({.call = StoreCall::add, .keys = {"n"}, .values = {}, .number = 2}, deadline, never).number,
      2);
  EXPECT_FALSE(client->failure());
}

TEST_F(AgentTest, a_grace_of_weeks_is_one) {
  auto patient = options();
  patient.stop_grace = std::chrono::hours(720);
  Agent agent(patient);
  auto client = connect(options().name);
  EXPECT_EQ(client->join(card(0, 1), seconds(30), [](const Failure&) {}).local_size, 1);
}

TEST_F(AgentTest, a_host_that_waits_for_the_head_can_be_stopped) {
  const SilentPort port;
  auto waiting = options();
  waiting.coordinator = false;
  waiting.node = 1;
  waiting.num_nodes = 2;
  waiting.local_ranks = 1;
  waiting.link = link_at(port.number());
  Agent agent(waiting);
  EXPECT_TRUE(comes_to_say("node 1 of 2 waits for node 0 at 127.0.0.1:" + std::to_string(port.number())));
  agent.stop(SIGTERM);
  pollfd ordered{agent.orders_fd(), POLLIN, 0};
  ASSERT_GT(::poll(&ordered, 1, 30000), 0);
  const auto orders = agent.take_orders();
  ASSERT_EQ(orders.size(), 1u);
  ASSERT_TRUE(std::holds_alternative<Finish>(orders[0]));
  EXPECT_EQ(std::get<Finish>(orders[0]).status, 143);
}

TEST_F(AgentTest, a_name_that_only_this_host_reaches_is_told) {
  auto coordinator = options();
  coordinator.num_nodes = 0;
  coordinator.link = link_at(0);
  coordinator.link->address = "localhost";
  Agent agent(coordinator);
  EXPECT_THAT(all_said(),
              AllOf(HasSubstr("localhost resolves to "), HasSubstr("which only this host can reach")));
}

TEST_F(AgentTest, a_head_that_accepts_and_never_answers_is_no_trap) {
  const auto silent = listen_tcp("127.0.0.1", 0, 0);
  auto caller = options();
  caller.coordinator = false;
  caller.join_timeout = milliseconds(1000);
  caller.link = link_at(silent.port);
  Agent agent(caller);
  auto client = connect(caller.name);
  EXPECT_THAT(error_of<Error>([&] { client->join(card(1, 2), seconds(30), [](const Failure&) {}); }),
              HasSubstr("no answer"));
}

TEST_F(AgentTest, a_host_with_another_key_is_told) {
  Agent coordinator(head_options());
  auto stranger = other_options(coordinator);
  stranger.link->key = std::string(32, 'x');
  Agent other(stranger);
  auto client = connect(stranger.name);
  EXPECT_THAT(error_of<ConfigError>([&] { client->join(card(1, 2), seconds(30), [](const Failure&) {}); }),
              AllOf(HasSubstr(coordinator.address()), HasSubstr("another key")));
}

}  // namespace
}  // namespace lockstep::control

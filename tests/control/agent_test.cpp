// Agents and ranks over real sockets; where a rank must die, it is a process.
#include <lockstep/control/agent.h>

#include <poll.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <future>
#include <thread>

#include <lockstep/control/client.h>
#include <lockstep/control/key.h>

#include "support/errors.h"

namespace lockstep::control {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;

bool never() { return false; }

class AgentTest : public ::testing::Test {
 protected:
  AgentOptions options(const std::string& suffix = "") {
    AgentOptions options;
    options.name = "lockstep/test/" + std::to_string(::getpid()) + "/" +
                   ::testing::UnitTest::GetInstance()->current_test_info()->name() + suffix;
    options.agent_rank = 0;
    options.say = [this](const std::string& line) {
      std::lock_guard lock(mutex);
      said += line + "\n";
    };
    return options;
  }
  static std::shared_ptr<Client> connect(const std::string& name) {
    for (;;)
      if (auto socket = connect_local(name)) return Client::make(std::move(*socket));
  }
  static Hello card(int rank, int size) {
    return {.rank = rank, .size = size, .pid = ::getpid(), .version = "1", .host = "here"};
  }
  // A rank that is a process: joins, then does what the test says.
  template <typename F>
  pid_t process(const std::string& name, int rank, int size, F then) {
    const pid_t pid = ::fork();
    if (pid != 0) return pid;
    auto client = connect(name);
    client->join(card(rank, size), seconds(30), [](const Failure&) {});
    then(*client);
    ::_exit(0);
  }
  // The head with a rank of its own, and another host's agent.
  std::pair<std::unique_ptr<Agent>, std::unique_ptr<Agent>> two_hosts() {
    use_sodium();
    auto head_options = options("/head"), other_options = options("/other");
    head_options.num_nodes = other_options.num_nodes = 0;
    head_options.link =
        Link{.address = "127.0.0.1", .port = 0, .last_port = 0, .key = std::string(32, 'k'), .job = "j"};
    auto head = std::make_unique<Agent>(head_options);
    const auto address = head->address();
    other_options.head = false;
    other_options.agent_rank = 1;
    other_options.link = head_options.link;
    other_options.link->port = other_options.link->last_port =
        std::stoi(address.substr(address.rfind(':') + 1));
    return {std::move(head), std::make_unique<Agent>(other_options)};
  }
  std::string all_said() {
    std::lock_guard lock(mutex);
    return said;
  }
  bool comes_to_say(const std::string& text) {
    for (int i = 0; i < 3000; ++i) {
      if (all_said().find(text) != std::string::npos) return true;
      std::this_thread::sleep_for(milliseconds(10));
    }
    return false;
  }

  std::mutex mutex;
  std::string said;
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
  for (int i = 0; i < 1000 && !agent.deserted(0); ++i) std::this_thread::sleep_for(milliseconds(10));
  EXPECT_TRUE(agent.deserted(0));
}

TEST_F(AgentTest, a_second_agent_of_a_name_is_told) {
  Agent agent(options());
  EXPECT_THROW(Agent second(options()), NameInUse);
}

TEST_F(AgentTest, a_rank_that_is_killed_is_named_to_the_others_with_its_signal) {
  Agent agent(options());
  std::promise<Failure> told;
  const pid_t victim = process(options().name, 1, 2, [](Client&) { ::pause(); });
  auto client = connect(options().name);
  client->join(card(0, 2), seconds(30), [&](const Failure& failure) { told.set_value(failure); });
  ::kill(victim, SIGKILL);
  const auto failure = told.get_future().get();
  EXPECT_EQ(failure.rank, 1);
  EXPECT_EQ(failure.pid, victim);
  EXPECT_THAT(failure.text(), HasSubstr("was killed by signal 9 (SIGKILL)"));
  // Whoever waits in the store is freed, now and later.
  EXPECT_THAT(error_of<Error>([&] {
                client->ask({.call = StoreCall::get, .keys = {"never"}, .values = {}},
                            Clock::now() + seconds(60), never);
              }),
              HasSubstr("rank 1"));
  ::waitpid(victim, nullptr, 0);
}

TEST_F(AgentTest, a_stopped_rank_is_reported_goes_on_or_is_ended) {
  auto with_grace = options();
  with_grace.stop_grace = milliseconds(1500);
  Agent agent(with_grace);
  std::promise<Failure> told;
  const pid_t victim = process(options().name, 1, 2, [](Client&) { ::pause(); });
  auto client = connect(options().name);
  client->join(card(0, 2), seconds(30), [&](const Failure& failure) { told.set_value(failure); });
  ::kill(victim, SIGSTOP);
  EXPECT_TRUE(comes_to_say("rank 1 (pid " + std::to_string(victim) + ") is stopped"));
  ::kill(victim, SIGCONT);
  EXPECT_TRUE(comes_to_say("goes on after"));
  EXPECT_FALSE(client->failure());
  ::kill(victim, SIGSTOP);
  const auto failure = told.get_future().get();
  EXPECT_THAT(failure.text(), AllOf(HasSubstr("rank 1"), HasSubstr("it had been stopped for")));
  int status = 0;
  ::waitpid(victim, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status));
}

TEST_F(AgentTest, a_rank_held_by_a_debugger_is_reported_and_left_alone) {
  auto with_grace = options();
  with_grace.stop_grace = milliseconds(300);
  Agent agent(with_grace);
  const pid_t victim = process(options().name, 1, 2, [](Client&) { ::pause(); });
  auto client = connect(options().name);
  client->join(card(0, 2), seconds(30), [](const Failure&) {});
  ASSERT_EQ(::ptrace(PTRACE_SEIZE, victim, nullptr, nullptr), 0);
  ASSERT_EQ(::ptrace(PTRACE_INTERRUPT, victim, nullptr, nullptr), 0);
  ::waitpid(victim, nullptr, __WALL);
  EXPECT_TRUE(comes_to_say("is held by a debugger (pid " + std::to_string(::getpid()) + ")"));
  std::this_thread::sleep_for(milliseconds(600));
  EXPECT_FALSE(client->failure());
  ::kill(victim, SIGKILL);
  ::waitpid(victim, nullptr, __WALL);
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
    EXPECT_TRUE(comes_to_say("was cut off"));
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
  auto [head, other] = two_hosts();
  const auto head_options = options("/head"), other_options = options("/other");
  std::promise<Failure> told;
  auto far = std::async(std::launch::async, [&] {
    auto client = connect(other_options.name);
    client->join(card(1, 2), seconds(30), [](const Failure&) {});
    client->ask({.call = StoreCall::set, .keys = {"k"}, .values = {"far"}}, Clock::now() + seconds(30),
                never);
    return client;
  });
  auto client = connect(head_options.name);
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
  other.reset();  // the host is gone
  EXPECT_THAT(told.get_future().get().text(),
              AllOf(HasSubstr("rank 1 (pid "), HasSubstr("and with it the agent of the host at 127.0.0.1")));
}

// On the host of the first one and on the other: it is told, and the job goes on when it leaves and when it
// ends.
TEST_F(AgentTest, a_second_process_of_a_rank_is_refused_and_disturbs_nobody) {
  auto [head, other] = two_hosts();
  const auto here = options("/head").name, there = options("/other").name;
  auto blamed = [](const Failure& failure) { ADD_FAILURE() << failure.text(); };
  auto far = std::async(std::launch::async, [&] {
    auto client = connect(there);
    client->join(card(1, 2), seconds(30), blamed);
    return client;
  });
  auto near = connect(here);
  near->join(card(0, 2), seconds(30), blamed);
  auto far_client = far.get();
  for (const auto& name : {here, there})
    for (const bool leaves : {true, false}) {
      const pid_t second = ::fork();
      if (second == 0) {
        auto client = connect(name);
        try {
          client->join(card(0, 2), seconds(30), [](const Failure&) {});
        } catch (const ConfigError& error) {
          if (leaves) client->leave();
          ::_exit(std::string(error.what()).find("two processes have RANK=0") != std::string::npos ? 7 : 8);
        }
        ::_exit(9);
      }
      int status = 0;
      ::waitpid(second, &status, 0);
      EXPECT_EQ(WEXITSTATUS(status), 7);
    }
  std::this_thread::sleep_for(milliseconds(500));  // a verdict would have come
  for (const auto& client : {near, far_client}) {
    const auto deadline = Clock::now() + seconds(30);
    client->ask({.call = StoreCall::set, .keys = {"k"}, .values = {"v"}}, deadline, never);
    EXPECT_FALSE(client->failure());
  }
  EXPECT_EQ(all_said(), "");
  near->leave();
  far_client->leave();
}

TEST_F(AgentTest, a_head_that_accepts_and_never_answers_is_no_trap) {
  const auto silent = listen_tcp("127.0.0.1", 0, 0);
  auto caller = options();
  caller.head = false;
  caller.join_timeout = milliseconds(1000);
  caller.link = Link{.address = "127.0.0.1",
                     .port = silent.port,
                     .last_port = silent.port,
                     .key = std::string(32, 'k'),
                     .job = "j"};
  Agent agent(caller);
  auto client = connect(caller.name);
  EXPECT_THAT(error_of<Error>([&] { client->join(card(1, 2), seconds(30), [](const Failure&) {}); }),
              HasSubstr("does not answer"));
}

TEST_F(AgentTest, a_host_with_another_key_is_told) {
  auto head_options = options("/head"), other_options = options("/other");
  head_options.num_nodes = 0;
  head_options.link =
      Link{.address = "127.0.0.1", .port = 0, .last_port = 0, .key = std::string(32, 'k'), .job = "j"};
  Agent head(head_options);
  const auto address = head.address();
  other_options.head = false;
  other_options.link = head_options.link;
  other_options.link->key = std::string(32, 'x');
  other_options.link->port = other_options.link->last_port =
      std::stoi(address.substr(address.rfind(':') + 1));
  Agent other(other_options);
  auto client = connect(other_options.name);
  EXPECT_THAT(error_of<ConfigError>([&] { client->join(card(1, 2), seconds(30), [](const Failure&) {}); }),
              AllOf(HasSubstr(address), HasSubstr("another key")));
}

}  // namespace
}  // namespace lockstep::control

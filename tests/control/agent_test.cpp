// Agents and ranks over real sockets; where a rank must die, it is a process.
#include <lockstep/control/agent.h>

#include <poll.h>
#include <sched.h>
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

// What is left of it is read before its end is: it has come, and is named.
TEST_F(AgentTest, a_rank_that_dies_right_after_its_hello_ends_itself_alone) {
  for (int i = 0; i < 6; ++i) {
    const auto each = options("/" + std::to_string(i));
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
    } catch (const JoinError&) {  // told already
    }
    const auto failure = client->failure(seconds(30));
    ASSERT_TRUE(failure);
    EXPECT_EQ(failure->rank, 1);
  }
}

// By fork(), whose child closes what is not its own, and by a copy of the descriptors that hides the end of
// the connection.
TEST_F(AgentTest, an_agent_that_ends_is_missed_though_a_child_of_its_process_lives) {
  for (const bool copies : {false, true}) {
    const auto each = options(copies ? "/copies" : "/fork");
    int ready[2];
    ASSERT_EQ(::pipe(ready), 0);
    const pid_t holder = ::fork();
    if (holder == 0) {
      Agent agent(each);
      auto client = connect(each.name);
      client->join(card(0, 2), seconds(30), [](const Failure&) {});
      const pid_t helper = copies ? ::_Fork() : ::fork();
      if (helper == 0) {
        ::sleep(60);
        ::_exit(0);
      }
      [[maybe_unused]] auto written = ::write(ready[1], &helper, sizeof helper);
      for (;;) ::pause();
    }
    std::promise<Failure> told;
    auto client = connect(each.name);
    client->join(card(1, 2), seconds(30), [&](const Failure& failure) { told.set_value(failure); });
    pid_t helper = 0;
    ASSERT_EQ(::read(ready[0], &helper, sizeof helper), static_cast<ssize_t>(sizeof helper));
    ::kill(holder, SIGKILL);
    ::waitpid(holder, nullptr, 0);
    auto failure = told.get_future();
    EXPECT_EQ(failure.wait_for(seconds(10)), std::future_status::ready) << "copies: " << copies;
    if (!copies) {
      EXPECT_FALSE(connect_local(each.name)) << "its name is free for the next";
    }
    ::kill(helper, SIGKILL);
    for (int fd : ready) ::close(fd);
    EXPECT_THAT(failure.get().text(), HasSubstr("rank 0 (pid " + std::to_string(holder) + ")"));
  }
}

TEST_F(AgentTest, a_child_of_a_rank_cannot_speak_for_it) {
  Agent agent(options());
  auto blamed = [](const Failure& failure) { ADD_FAILURE() << failure.text(); };
  auto other = std::async(std::launch::async, [&] {
    auto client = connect(options().name);
    client->join(card(1, 2), seconds(30), blamed);
    return client;
  });
  auto client = connect(options().name);
  client->join(card(0, 2), seconds(30), blamed);
  auto second = other.get();
  const pid_t child = ::fork();
  if (child == 0) {
    client->tell(Fault{Fault::Kind::exception, "a helper's trouble"});
    client->request_stop(SIGTERM);
    client->leave();
    bool refused = false;
    try {
      client->ask({.call = StoreCall::set, .keys = {"k"}, .values = {"v"}}, Clock::now() + seconds(5), never);
    } catch (const Error&) {
      refused = true;
    }
    ::_exit(refused && !client->usable() && !client->stop_requested() ? 7 : 8);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 7);
  std::this_thread::sleep_for(milliseconds(300));
  EXPECT_FALSE(client->stop_requested());
  client->ask({.call = StoreCall::set, .keys = {"k"}, .values = {"v"}}, Clock::now() + seconds(30), never);
  client->leave();
  second->leave();
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
              HasSubstr("a key of 5000 bytes is not allowed"));
  EXPECT_THAT(error_of<Error>([&] {
                client->ask({.call = StoreCall::set, .keys = {"k"}, .values = {std::string(2 << 20, 'v')}},
                            deadline, never);
              }),
              HasSubstr("not allowed"));
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
  const auto nobody = [] { return listen_tcp("127.0.0.1", 0, 0).port; }();
  auto waiting = options();
  waiting.head = false;
  waiting.node = 1;
  waiting.num_nodes = 2;
  waiting.local_ranks = 1;
  waiting.link = Link{
      .address = "127.0.0.1", .port = nobody, .last_port = nobody, .key = std::string(32, 'k'), .job = "j"};
  Agent agent(waiting);
  EXPECT_TRUE(comes_to_say("node 1 of 2 waits for node 0 at 127.0.0.1:" + std::to_string(nobody)));
  agent.stop(SIGTERM);
  pollfd ordered{agent.orders_fd(), POLLIN, 0};
  ASSERT_GT(::poll(&ordered, 1, 30000), 0);
  const auto orders = agent.take_orders();
  ASSERT_EQ(orders.size(), 1u);
  ASSERT_TRUE(std::holds_alternative<Finish>(orders[0]));
  EXPECT_EQ(std::get<Finish>(orders[0]).status, 143);
}

TEST_F(AgentTest, a_name_that_only_this_host_reaches_is_told) {
  auto head = options();
  head.num_nodes = 0;
  head.link =
      Link{.address = "localhost", .port = 0, .last_port = 0, .key = std::string(32, 'k'), .job = "j"};
  Agent agent(head);
  EXPECT_THAT(all_said(), AllOf(HasSubstr("localhost is "), HasSubstr("which only this host reaches")));
}

// Its kernel still acknowledges what it is sent: it has the time that a stopped rank has.
TEST_F(AgentTest, an_agent_of_another_host_may_be_stopped_for_a_while) {
  use_sodium();
  auto head_options = options("/head"), other_options = options("/other");
  head_options.num_nodes = other_options.num_nodes = 0;
  head_options.stop_grace = seconds(4);
  head_options.link =
      Link{.address = "127.0.0.1", .port = 0, .last_port = 0, .key = std::string(32, 'k'), .job = "j"};
  Agent head(head_options);
  const auto address = head.address();
  const pid_t holder = ::fork();
  if (holder == 0) {
    other_options.head = false;
    other_options.agent_rank = 1;
    other_options.link = head_options.link;
    other_options.link->port = other_options.link->last_port =
        std::stoi(address.substr(address.rfind(':') + 1));
    Agent other(other_options);
    auto client = connect(other_options.name);
    client->join(card(1, 2), seconds(30), [](const Failure&) {});
    for (;;) ::pause();
  }
  std::promise<Failure> told;
  auto client = connect(head_options.name);
  client->join(card(0, 2), seconds(30), [&](const Failure& failure) { told.set_value(failure); });
  ::kill(holder, SIGSTOP);
  EXPECT_TRUE(comes_to_say("the agent at 127.0.0.1 says nothing, though its host is there"));
  EXPECT_FALSE(client->failure());
  ::kill(holder, SIGCONT);
  EXPECT_TRUE(comes_to_say("the agent at 127.0.0.1 goes on"));
  ::kill(holder, SIGSTOP);
  EXPECT_THAT(told.get_future().get().text(), HasSubstr("nothing was heard from it for 4."));
  ::kill(holder, SIGKILL);
  ::waitpid(holder, nullptr, 0);
}

// The agent lives where it cannot see the pid of the test, which sees the agent's.
TEST_F(AgentTest, ranks_in_separate_pid_namespaces_meet) {
  const auto here = options();  // its name has the test's pid
  int result[2];
  ASSERT_EQ(::pipe(result), 0);
  const pid_t outer = ::fork();
  if (outer == 0) {
    pid_t inner = ::unshare(CLONE_NEWPID) == 0 ? ::fork() : -1;
    if (inner == 0) {
      Agent agent(here);
      auto client = connect(here.name);
      client->join(card(0, 2), seconds(30), [](const Failure&) {});
      for (;;) ::pause();
    }
    [[maybe_unused]] auto written = ::write(result[1], &inner, sizeof inner);
    ::_exit(0);
  }
  pid_t inner = -1;
  ASSERT_EQ(::read(result[0], &inner, sizeof inner), static_cast<ssize_t>(sizeof inner));
  for (int fd : result) ::close(fd);
  ::waitpid(outer, nullptr, 0);
  if (inner < 0) GTEST_SKIP() << "a pid namespace needs rights that this user does not have";
  std::promise<Failure> told;
  auto client = connect(here.name);
  client->join(card(1, 2), seconds(30), [&](const Failure& failure) { told.set_value(failure); });
  std::this_thread::sleep_for(milliseconds(500));  // it would be looked for
  EXPECT_FALSE(client->failure());
  if (inner > 1) ::kill(inner, SIGKILL);
  EXPECT_THAT(told.get_future().get().text(), HasSubstr("and with it the control plane of this host"));
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

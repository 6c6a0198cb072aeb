// Agents, and ranks that are processes: killed, stopped, debugged, forked.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <future>
#include <thread>

#include "control/agent/agent_fixture.h"

namespace lockstep::control {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;

// A process that runs agent_probe.cpp; killed at the end of its scope.
class Probe {
 public:
  explicit Probe(std::vector<std::string> words) {
    words.insert(words.begin(), LOCKSTEP_AGENT_PROBE);
    std::vector<char*> arguments;
    for (auto& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    int ends[2];
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    EXPECT_EQ(::posix_spawn(&pid_, arguments[0], &actions, nullptr, arguments.data(), environ), 0);
    ::posix_spawn_file_actions_destroy(&actions);
    ::close(ends[1]);
    output_ = Fd(ends[0]);
  }
  ~Probe() {
    send(SIGKILL);
    wait();
  }
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  pid_t pid() const { return pid_; }
  void send(int signal) {
    if (!status_ && pid_ > 0) ::kill(pid_, signal);
  }
  // Its exit status; 128 + the signal's number.
  int wait() {
    if (!status_ && pid_ > 0) {
      int status = 0;
      EXPECT_EQ(::waitpid(pid_, &status, __WALL), pid_);
      status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    return status_.value_or(-1);
  }
  // The number in the line that it prints; 0: it ended without one.
  int says() {
    std::string line;
    for (char byte; ::read(output_.get(), &byte, 1) == 1 && byte != '\n';) line += byte;
    return std::atoi(line.c_str());
  }

 private:
  pid_t pid_ = -1;
  Fd output_;
  std::optional<int> status_;
};

using AgentProcesses = AgentTest;

TEST_F(AgentProcesses, a_rank_that_is_killed_is_named_to_the_others_with_its_signal) {
  Agent agent(options());
  std::promise<Failure> told;
  Probe victim({"rank", options().name, "1", "2"});
  auto client = connect(options().name);
  client->join(card(0, 2), seconds(30), [&](const Failure& failure) { told.set_value(failure); });
  victim.send(SIGKILL);
  const auto failure = told.get_future().get();
  EXPECT_EQ(failure.rank, 1);
  EXPECT_EQ(failure.pid, victim.pid());
  EXPECT_THAT(failure.text(), HasSubstr("was killed by signal 9 (SIGKILL)"));
  // A rank that waits in the store is released, now and later.
  EXPECT_THAT(error_of<Error>([&] {
                client->ask({.call = StoreCall::get, .keys = {"never"}, .values = {}},
                            Clock::now() + seconds(60), never);
              }),
              HasSubstr("rank 1"));
}

TEST_F(AgentProcesses, a_stopped_rank_is_reported_goes_on_or_is_ended) {
  auto with_grace = options();
  with_grace.stop_grace = milliseconds(3000);  // Far longer than the first stop lasts on a busy machine.
  Agent agent(with_grace);
  std::promise<Failure> told;
  Probe victim({"rank", options().name, "1", "2"});
  auto client = connect(options().name);
  client->join(card(0, 2), seconds(30), [&](const Failure& failure) { told.set_value(failure); });
  victim.send(SIGSTOP);
  EXPECT_TRUE(comes_to_say("rank 1 (pid " + std::to_string(victim.pid()) + ") is stopped"));
  victim.send(SIGCONT);
  EXPECT_TRUE(comes_to_say("resumed after"));
  EXPECT_FALSE(client->failure());
  victim.send(SIGSTOP);
  const auto failure = told.get_future().get();
  EXPECT_THAT(failure.text(), AllOf(HasSubstr("rank 1"), HasSubstr("it had been stopped for")));
  EXPECT_EQ(victim.wait(), 128 + SIGKILL);
}

TEST_F(AgentProcesses, a_rank_held_by_a_debugger_is_reported_and_left_alone) {
  auto with_grace = options();
  with_grace.stop_grace = milliseconds(300);
  Agent agent(with_grace);
  Probe victim({"rank", options().name, "1", "2"});
  auto client = connect(options().name);
  client->join(card(0, 2), seconds(30), [](const Failure&) {});
  ASSERT_EQ(::ptrace(PTRACE_SEIZE, victim.pid(), nullptr, nullptr), 0);
  ASSERT_EQ(::ptrace(PTRACE_INTERRUPT, victim.pid(), nullptr, nullptr), 0);
  ::waitpid(victim.pid(), nullptr, __WALL);
  EXPECT_TRUE(comes_to_say("is held by a debugger (pid " + std::to_string(::getpid()) + ")"));
  EXPECT_FALSE(client->failure(milliseconds(300))) << "it has been held for longer than the grace";
}

// On the first one's host and on the other: it is reported, and the job continues when it leaves and when it
// ends.
TEST_F(AgentProcesses, a_second_process_of_a_rank_is_refused_and_disturbs_nobody) {
  auto [coordinator, other] = two_hosts();
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
    for (const bool leaves : {true, false})
      EXPECT_EQ(Probe({"second", name, leaves ? "leave" : "end"}).wait(), 7);
  EXPECT_FALSE(near->failure(milliseconds(500)));  // A verdict would have arrived.
  for (const auto& client : {near, far_client}) {
    const auto deadline = Clock::now() + seconds(30);
    client->ask({.call = StoreCall::set, .keys = {"k"}, .values = {"v"}}, deadline, never);
    EXPECT_FALSE(client->failure());
  }
  EXPECT_EQ(all_said(), "");
  near->leave();
  far_client->leave();
}

// By fork(), whose child closes the parent's descriptors, and by a copy of the descriptors that hides the end
// of the connection.
TEST_F(AgentProcesses, an_agent_that_ends_is_missed_though_a_child_of_its_process_lives) {
  for (const bool copies : {false, true}) {
    const auto each = options(copies ? "/copies" : "/fork");
    Probe holder({"holder", each.name, copies ? "copy" : "fork"});
    std::promise<Failure> told;
    auto client = connect(each.name);
    client->join(card(1, 2), seconds(30), [&](const Failure& failure) { told.set_value(failure); });
    const pid_t helper = holder.says();
    ASSERT_GT(helper, 0);
    holder.send(SIGKILL);
    holder.wait();
    auto failure = told.get_future();
    EXPECT_EQ(failure.wait_for(seconds(30)), std::future_status::ready) << "copies: " << copies;
    if (!copies) {
      EXPECT_FALSE(connect_local(each.name)) << "its name is free for the next";
    }
    ::kill(helper, SIGKILL);
    EXPECT_THAT(failure.get().text(), HasSubstr("rank 0 (pid " + std::to_string(holder.pid()) + ")"));
  }
}

TEST_F(AgentProcesses, a_child_of_a_rank_cannot_speak_for_it) {
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
  EXPECT_FALSE(client->failure(milliseconds(300)));
  EXPECT_FALSE(client->stop_requested());
  client->ask({.call = StoreCall::set, .keys = {"k"}, .values = {"v"}}, Clock::now() + seconds(30), never);
  client->leave();
  second->leave();
}

// Its kernel still acknowledges data, so it gets the time of a stopped rank.
TEST_F(AgentProcesses, an_agent_of_another_host_may_be_stopped_for_a_while) {
  auto patient = head_options();
  patient.stop_grace = seconds(4);
  Agent coordinator(patient);
  Probe holder({"host", options("/other").name, std::to_string(port_of(coordinator))});
  std::promise<Failure> told;
  auto client = connect(patient.name);
  client->join(card(0, 2), seconds(30), [&](const Failure& failure) { told.set_value(failure); });
  holder.send(SIGSTOP);
  EXPECT_TRUE(comes_to_say("the agent at 127.0.0.1 does not respond, although its host does"));
  EXPECT_FALSE(client->failure());
  holder.send(SIGCONT);
  EXPECT_TRUE(comes_to_say("the agent at 127.0.0.1 responds again"));
  holder.send(SIGSTOP);
  EXPECT_THAT(told.get_future().get().text(), HasSubstr("it sent nothing for 4."));
}

// As when a machine with several hosts is frozen: none of them is considered lost when it resumes.
TEST_F(AgentProcesses, time_in_which_agents_could_hear_nobody_does_not_count) {
  Probe hosts({"hosts", options().name});
  ASSERT_EQ(hosts.says(), hosts.pid());
  for (int i = 0; i < 2; ++i) {
    hosts.send(SIGSTOP);
    std::this_thread::sleep_for(milliseconds(1800));  // An agent that is silent for 1.5 s is missed.
    hosts.send(SIGCONT);
    // It would be considered lost at the next look, in 100 ms.
    std::this_thread::sleep_for(milliseconds(500));
  }
  hosts.send(SIGTERM);
  EXPECT_EQ(hosts.wait(), 128 + SIGTERM);
}

// The agent cannot see the pid of the test, but the test sees the agent's.
TEST_F(AgentProcesses, ranks_in_separate_pid_namespaces_meet) {
  const auto here = options();  // Its name contains the test's pid.
  Probe outer({"namespace", here.name});
  const pid_t inner = outer.says();
  EXPECT_EQ(outer.wait(), 0);
  ASSERT_NE(inner, 0);
  if (inner < 0) GTEST_SKIP() << "a pid namespace needs rights that this user does not have";
  std::promise<Failure> told;
  auto client = connect(here.name);
  client->join(card(1, 2), seconds(30), [&](const Failure& failure) { told.set_value(failure); });
  EXPECT_FALSE(client->failure(milliseconds(500)));  // It would be looked for every 250 ms.
  ::kill(inner, SIGKILL);
  EXPECT_THAT(told.get_future().get().text(), HasSubstr("and with it the control plane of this host"));
}

}  // namespace
}  // namespace lockstep::control

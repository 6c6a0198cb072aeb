// A process of agent_processes_test.cpp. It is a separate program because ThreadSanitizer cannot follow
// threads into a child of fork().
//
//   rank NAME RANK SIZE     joins, and stays
//   second NAME leave|end   joins as rank 0 of 2, which exists already; 7: refused, as it should be
//   holder NAME fork|copy   runs the agent, is rank 0 of 2, and prints the pid of a child of its own
//   host NAME PORT          runs the agent of a host other than the coordinator's, and is rank 1 of 2
//   hosts NAME              runs two hosts, each with a rank, and prints that; 5: a failure was reported
//   namespace NAME          prints the pid of a holder in another pid namespace; -1: not permitted
#include <sched.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/control/link/key.h>

#include "control/coordinator/peers.h"

namespace {

using namespace lockstep::control;
constexpr std::chrono::seconds kLimit(30);

[[noreturn]] void stay() {
  for (;;) ::pause();
}

void say(pid_t pid) {
  std::printf("%d\n", static_cast<int>(pid));
  std::fflush(stdout);
}

std::shared_ptr<Client> join(const std::string& name, int rank, int size) {
  auto client = connect(name);
  client->join(card(rank, size), kLimit, [](const Failure&) {});
  return client;
}

AgentOptions options(const std::string& name, int rank) {
  AgentOptions options;
  options.name = name;
  options.agent_rank = rank;
  options.say = [](const std::string&) {};
  return options;
}

int second(const std::string& name, bool leaves) {
  auto client = connect(name);
  try {
    client->join(card(0, 2), kLimit, [](const Failure&) {});
  } catch (const lockstep::ConfigError& error) {
    if (leaves) client->leave();
    return std::string(error.what()).find("two processes have RANK=0") != std::string::npos ? 7 : 8;
  }
  return 9;
}

[[noreturn]] void hold(const AgentOptions& options, int rank, pid_t (*child)()) {
  const Agent agent(options);
  const auto client = join(options.name, rank, 2);
  if (child) {
    const pid_t helper = child();
    if (helper == 0) {
      ::sleep(60);
      ::_exit(0);
    }
    say(helper);
  }
  stay();
}

[[noreturn]] void in_a_namespace(const std::string& name) {
  const pid_t inner = ::unshare(CLONE_NEWPID) == 0 ? ::fork() : -1;
  if (inner == 0) {
    ::alarm(120);
    hold(options(name, 0), 0, nullptr);
  }
  say(inner);
  ::_exit(0);  // A leak checker's thread could not be created: new ones belong to the namespace.
}

AgentOptions host_options(const std::string& name, int rank, int port) {
  use_sodium();
  auto host = options(name, rank);
  host.num_nodes = 0;
  host.coordinator = rank == 0;
  host.link = link_at(port);
  return host;
}

[[noreturn]] void be_two_hosts(const std::string& name) {
  const Agent coordinator(host_options(name, 0, 0));
  const auto address = coordinator.address();
  const Agent other(host_options(name + "/other", 1, std::stoi(address.substr(address.rfind(':') + 1))));
  const auto end = [](const Failure&) { ::_exit(5); };
  auto first = connect(name), second = connect(name + "/other");
  std::thread joins([&] { first->join(card(0, 2), kLimit, end); });
  second->join(card(1, 2), kLimit, end);
  joins.join();
  say(::getpid());
  stay();
}

int act(const std::vector<std::string>& words) {
  const auto& verb = words.at(0);
  const auto& name = words.at(1);
  if (verb == "rank") {
    const auto client = join(name, std::stoi(words.at(2)), std::stoi(words.at(3)));
    stay();
  }
  if (verb == "second") return second(name, words.at(2) == "leave");
  if (verb == "holder") hold(options(name, 0), 0, words.at(2) == "fork" ? &::fork : &::_Fork);
  if (verb == "namespace") in_a_namespace(name);
  if (verb == "hosts") be_two_hosts(name);
  hold(host_options(name, 1, std::stoi(words.at(2))), 1, nullptr);
}

}  // namespace

int main(int argc, char** argv) {
  ::alarm(120);  // Ends the process whatever happens to the test.
  try {
    return act({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "agent_probe: %s\n", error.what());
    return 1;
  }
}

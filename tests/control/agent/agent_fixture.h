// Agents of a test, and their log lines.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include <lockstep/control/link/key.h>

#include "control/coordinator/peers.h"
#include "support/errors.h"

namespace lockstep::control {

inline bool never() { return false; }

class AgentTest : public ::testing::Test {
 protected:
  AgentOptions options(const std::string& suffix = "") {
    AgentOptions options;
    options.name = "lockstep/test/" + std::to_string(::getpid()) + "/" +
                   ::testing::UnitTest::GetInstance()->current_test_info()->name() + suffix;
    options.agent_rank = 0;
    options.say = [this](const std::string& line) {
      std::lock_guard lock(mutex_);
      said_ += line + "\n";
    };
    return options;
  }
  AgentOptions head_options() {
    use_sodium();
    auto coordinator = options("/head");
    coordinator.num_nodes = 0;
    coordinator.link = link_at(0);
    return coordinator;
  }
  AgentOptions other_options(const Agent& coordinator) {
    auto other = options("/other");
    other.num_nodes = 0;
    other.coordinator = false;
    other.agent_rank = 1;
    other.link = link_at(port_of(coordinator));
    return other;
  }
  static int port_of(const Agent& coordinator) {
    const auto address = coordinator.address();
    return std::stoi(address.substr(address.rfind(':') + 1));
  }
  // The coordinator with one rank, and another host's agent.
  std::pair<std::unique_ptr<Agent>, std::unique_ptr<Agent>> two_hosts() {
    auto coordinator = std::make_unique<Agent>(head_options());
    auto other = std::make_unique<Agent>(other_options(*coordinator));
    return {std::move(coordinator), std::move(other)};
  }
  std::string all_said() {
    std::lock_guard lock(mutex_);
    return said_;
  }
  bool comes_to_say(const std::string& text) {
    for (int i = 0; i < 3000; ++i) {
      if (all_said().find(text) != std::string::npos) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  }

 private:
  std::mutex mutex_;
  std::string said_;
};

}  // namespace lockstep::control

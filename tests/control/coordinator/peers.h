// Shared by the tests of agents and the processes that they start.
#pragma once

#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include <lockstep/control/agent/agent.h>
#include <lockstep/control/client.h>
#include <lockstep/os/socket.h>

namespace lockstep::control {

// Connects a rank, once an agent of that name exists.
inline std::shared_ptr<Client> connect(const std::string& name) {
  for (;; std::this_thread::sleep_for(std::chrono::milliseconds(1)))
    if (auto socket = connect_local(name)) return Client::make(std::move(*socket));
}

inline Hello card(int rank, int size) {
  return {.rank = rank, .size = size, .pid = ::getpid(), .version = "1", .host = "here"};
}

// A link to a coordinator on this host; port 0: the coordinator's own.
inline Link link_at(int port) {
  return {.address = "127.0.0.1", .port = port, .last_port = port, .key = std::string(32, 'k'), .job = "j"};
}

}  // namespace lockstep::control

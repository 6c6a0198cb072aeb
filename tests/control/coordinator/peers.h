// What the tests of agents and the processes that they start have in common.
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

// A rank's end, as soon as there is an agent of that name.
inline std::shared_ptr<Client> connect(const std::string& name) {
  for (;; std::this_thread::sleep_for(std::chrono::milliseconds(1)))
    if (auto socket = connect_local(name)) return Client::make(std::move(*socket));
}

inline Hello card(int rank, int size) {
  return {.rank = rank, .size = size, .pid = ::getpid(), .version = "1", .host = "here"};
}

// To a head on this host; port 0: of the head itself.
inline Link link_at(int port) {
  return {.address = "127.0.0.1", .port = port, .last_port = port, .key = std::string(32, 'k'), .job = "j"};
}

}  // namespace lockstep::control

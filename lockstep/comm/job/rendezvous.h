// Rendezvous: how processes find each other, through the agent of their host. `lockstep run` hosts the agent;
// under other launchers the first process of a host to bind the agent's socket becomes it.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/comm/c10d/transport.h>
#include <lockstep/control/client.h>
#include <lockstep/launch/identity/identity.h>

namespace lockstep::detail {

struct Membership {
  std::shared_ptr<control::Client> client;
  std::string prefix;      // prefix of this World's keys in the store
  std::string address;     // this host's address as its peers reach it; empty: all ranks are on this host
  std::vector<int> nodes;  // host number of each rank: ranks with the same number share a host
};

// Waits for every rank and fills in what the environment left open (local rank and size). Calls on_failure
// from another thread when the job fails. Throws ConfigError on every rank if the ranks contradict each
// other, and CommError naming the missing ranks.
Membership join_job(Identity& identity, std::chrono::milliseconds timeout,
                    std::function<void(const control::Failure&)> on_failure);

// Leaves the job. A process that hosts the agent stays until its peers have left, however long they take.
// After a failure it stays only until they have been notified.
void leave_job(control::Client& client, bool in_order) noexcept;

// Throws ConfigError unless all members of a group give the same ranks in the same order.
void agree_on_order(const TransportContext& context, std::chrono::milliseconds timeout);

}  // namespace lockstep::detail

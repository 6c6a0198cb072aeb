// How processes find one another: through the agent of their host. `lockstep run` holds it; under other
// launchers the first process of a host that gets there becomes it.
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
  std::string prefix;      // of this World's keys in the store
  std::string address;     // of this host, as its peers reach it; empty: all ranks are on this host
  std::vector<int> nodes;  // of each rank: those with the same number share a host
};

// Waits for every rank; works out what the environment left open (local rank and size). on_failure is called
// when the job has failed, from another thread. ConfigError on every rank when ranks contradict one another,
// CommError naming those that did not come.
Membership join_job(Identity& identity, std::chrono::milliseconds timeout,
                    std::function<void(const control::Failure&)> on_failure);

// Leaves; a process that holds the agent stays until the others have left, however long they work. After a
// failure it stays only until they have been told.
void leave_job(control::Client& client, bool in_order) noexcept;

// Members of a group give the same ranks in the same order: ConfigError where they do not.
void agree_on_order(const TransportContext& context, std::chrono::milliseconds timeout);

}  // namespace lockstep::detail

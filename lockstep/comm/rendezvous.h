// How processes find one another: through c10d's TCPStore at the master's address.
#pragma once

#include <chrono>
#include <string>

#include <lockstep/comm/transport.h>
#include <lockstep/launch/identity.h>

namespace lockstep::detail {

// Rank 0 serves the store, unless the launcher does. Throws CommError when it cannot be reached in time.
c10::intrusive_ptr<c10d::Store> connect_store(const Identity& identity, std::chrono::milliseconds timeout);

// Waits for every rank, compares what they believe of the job, and works out what the environment left
// open (local rank and size). Returns this host's address as its peers reach it; empty: loopback.
// ConfigError on every rank when ranks contradict one another, CommError naming those that did not come.
std::string meet(c10d::Store& store, Identity& identity, std::chrono::milliseconds timeout);

// Members of a group give the same ranks in the same order: ConfigError where they do not.
void agree_on_order(const TransportContext& context, std::chrono::milliseconds timeout);

// The rank that serves the store goes last, but waits no longer than the limit.
void leave(c10d::Store& store, const Identity& identity, std::chrono::milliseconds limit);

}  // namespace lockstep::detail

// Signals read from a descriptor instead of interrupting the process.
#pragma once

#include <csignal>
#include <initializer_list>

#include <lockstep/os/socket.h>

namespace lockstep::detail {

// Signals that end a job in order, and those forwarded for the ranks' own use.
constexpr std::initializer_list<int> kForwarded = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

// Blocks the signals, for the calling thread and threads it starts, and returns a descriptor to read them
// from. Ignored signals (under nohup, in the background) stay ignored: if blocked, they would be
// delivered.
control::Fd take_signals(std::initializer_list<int> first, std::initializer_list<int> more = {});

}  // namespace lockstep::detail

// Signals that are read from a descriptor instead of interrupting.
#pragma once

#include <csignal>
#include <initializer_list>

#include <lockstep/os/socket.h>

namespace lockstep::detail {

// Those that end a job in order, and those that are the ranks' own affair.
constexpr std::initializer_list<int> kForwarded = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

// Blocks them, for the calling thread and those it makes, and reads them from here on. Under nohup and in the
// background some are ignored, and stay so: blocked, they would be taken all the same.
control::Fd take_signals(std::initializer_list<int> first, std::initializer_list<int> more = {});

}  // namespace lockstep::detail

// A rank that prints lines in several ways and then kills itself, without a chance to flush.
//   lines_probe [wait|blocks]     wait: for a line of input; blocks: the program itself sets block buffering
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <iostream>
#include <string>

#include <lockstep/lockstep.h>
#include "cmake/multicall.h"

namespace lockstep::testing::lines_probe {

namespace {

// All probes are one binary: only this one prints.
const bool kPrinted =
    std::string(program_invocation_short_name) == "lines_probe" && std::printf("before main\n") > 0;

}  // namespace

MULTICALL_MAIN(lines_probe) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "blocks") std::setvbuf(stdout, nullptr, _IOFBF, 1 << 16);
  std::printf("by stdio, before the World%s\n", kPrinted ? "" : "?");
  auto world = lockstep::World::from_environment();
  std::printf("by stdio, a terminal: %d\n", ::isatty(STDOUT_FILENO));
  std::cout << "by cout\n";
  std::string line;
  if (mode == "wait") std::getline(std::cin, line);
  std::cout << "the last line\nthe beginning of a line";
  return ::kill(::getpid(), SIGKILL);
}

}  // namespace lockstep::testing::lines_probe

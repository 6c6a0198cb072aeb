// The loop of a benchmark's ranks: each prints "ready", then answers each line "KIND STEPS", which the
// conductor (team.py) sends to all of them at once, with a number.
#pragma once

#include <chrono>
#include <iostream>
#include <sstream>
#include <string>

#include <lockstep/comm/group.h>

namespace lockstep::bench {

template <typename Step>
double milliseconds_of_a_step(int steps, const Step& step) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < steps; ++i) step();
  const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - begin;
  return elapsed.count() / steps;
}

// answer(kind, steps) returns the number. All ranks start it together.
template <typename Answer>
void serve(Group group, const Answer& answer) {
  std::cout << "ready" << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string kind;
    int steps = 0;
    words >> kind >> steps;
    group.barrier().wait();
    std::cout << answer(kind, steps) << std::endl;
  }
}

}  // namespace lockstep::bench

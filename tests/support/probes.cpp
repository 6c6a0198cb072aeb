// Runs the probe whose name the program was started by.
#include <cstdio>
#include <filesystem>
#include <map>
#include <string>

#include "support/probe.h"

namespace lockstep::testing {
namespace {

std::map<std::string, ProbeMain>& probes() {
  static std::map<std::string, ProbeMain> all;
  return all;
}

}  // namespace

Probe::Probe(const char* name, ProbeMain run) { probes().emplace(name, run); }

}  // namespace lockstep::testing

int main(int argc, char** argv) {
  const std::string path = argv[0];
  const auto found = lockstep::testing::probes().find(path.substr(path.rfind('/') + 1));
  if (found != lockstep::testing::probes().end()) return found->second(argc, argv);
  std::fprintf(stderr, "probes: expected the name of a probe as argv[0], got '%s'\n", argv[0]);
  return 2;
}

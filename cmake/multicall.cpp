// Runs the program selected by the name under which the binary was started.
#include "cmake/multicall.h"

#include <cstdio>
#include <map>
#include <string>

namespace lockstep::multicall {
namespace {

std::map<std::string, Main>& programs() {
  static std::map<std::string, Main> all;
  return all;
}

}  // namespace

Program::Program(const char* name, Main main) { programs().emplace(name, main); }

}  // namespace lockstep::multicall

int main(int argc, char** argv) {
  const std::string path = argv[0];
  const auto& programs = lockstep::multicall::programs();
  const auto found = programs.find(path.substr(path.rfind('/') + 1));
  if (found != programs.end()) return found->second(argc, argv);
  std::fprintf(stderr, "expected argv[0] to end in one of these names, got '%s':\n", argv[0]);
  for (const auto& [name, unused] : programs) std::fprintf(stderr, "  %s\n", name.c_str());
  return 2;
}

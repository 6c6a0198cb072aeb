// Programs that scripts and tests start. Several are linked into one binary, because each would take as long
// to compile and link as all of them together. The binary has a symbolic link per program and runs the one
// named by argv[0]. CMake's lockstep_multicall() declares such a binary.
#pragma once

namespace lockstep::multicall {

using Main = int (*)(int argc, char** argv);

// Registers a program under its name.
struct Program {
  Program(const char* name, Main main);
};

}  // namespace lockstep::multicall

// MULTICALL_MAIN(name) { ... } defines the main() of a program. Put it in a namespace of the program's own,
// because the sources are compiled in batches.
#define MULTICALL_MAIN(name)                                                     \
  int multicall_main(int argc, char** argv);                                     \
  const ::lockstep::multicall::Program multicall_program(#name, multicall_main); \
  int multicall_main([[maybe_unused]] int argc, [[maybe_unused]] char** argv)

// Programs that tests start. They are one binary, because each of them would take as long to compile and link as
// all of them: it has a symbolic link per probe and runs the probe it was started as.
#pragma once

namespace lockstep::testing {

using ProbeMain = int (*)(int argc, char** argv);

// Registers a probe under its name.
struct Probe {
  Probe(const char* name, ProbeMain run);
};

}  // namespace lockstep::testing

// PROBE(name) { ... } is the main() of the probe.
#define PROBE(name)                                         \
  int run_probe(int argc, char** argv);                     \
  const ::lockstep::testing::Probe probe(#name, run_probe); \
  int run_probe([[maybe_unused]] int argc, [[maybe_unused]] char** argv)

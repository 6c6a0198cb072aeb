// Runs a test's body on every rank of the setting given on the command line:
//
//   conformance --transport=threads --ranks=4            ranks as threads of this process
//   lockstep run -n 4 conformance --transport=gloo       ranks as processes, this one being one of them
#pragma once

#include <functional>
#include <string>

#include <lockstep/lockstep.h>

#include "support/errors.h"

namespace lockstep::testing {

const std::string& transport();  // "threads", "gloo", "mpi", "nccl", "cuda_ipc", "fake_nccl"
bool by_nccls_rules();           // NCCL, or a transport that behaves like it (fake_nccl.h).
at::Device test_device();        // Device of its tensors: this rank's GPU, or the CPU.
int num_ranks();
bool ranks_are_threads();
// True if ranks' calls are compared before data moves: by the transport or LOCKSTEP_CHECK.
bool compares_calls();

// Skips the current test unless there are at least `needed` ranks. The count is the same on every rank, so
// all of them skip.
#define LOCKSTEP_NEEDS_RANKS(needed) \
  if (num_ranks() < (needed)) GTEST_SKIP() << "needs at least " << (needed) << " ranks, got " << num_ranks()

// One World for all tests of a process: a test that breaks a group creates its own.
void on_every_rank(const std::function<void(World&)>& body);

// For a test that breaks the whole World, last in its process: creates one for this test only.
World fresh_world(WorldOptions options = {});

}  // namespace lockstep::testing

// The identity of this process in the job, read from the environment set by `lockstep run`, torchrun, mpirun
// of Open MPI or MPICH, srun, or by hand. The innermost launcher wins; docs/guides/launching.md has the table.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include <lockstep/launch/identity/ancestors.h>

namespace lockstep::detail {

struct Identity {
  int rank = 0;
  int size = 1;
  std::optional<int> local_rank, local_size;  // Empty: determined when the ranks join.
  // "lockstep run", "torchrun", "Open MPI", "MPICH", "SLURM", "environment" (RANK and WORLD_SIZE set by
  // hand), "the program" (given as arguments), "none".
  std::string launcher = "none";
  int restart_count = 0;
  // Socket name of the agent run by `lockstep run`; empty under other launchers.
  std::string agent;
  // Under other launchers: a text that is the same on every rank of this job (and restart) and unique on this
  // host. At most 72 characters.
  std::string job;
  // Where agents of several hosts connect. An empty address means it is unknown, and all ranks must be on one
  // host. A given port is both first and last; a derived one is a range, from which any port may be taken.
  std::string master_address;
  int master_port = 0, last_master_port = 0;
  // torchrun's agent already listens at master_port: the coordinator takes another port and publishes it in
  // that store.
  bool store_is_served = false;
  std::optional<int> threads;  // Threads per rank, if set.
};

// Reads rank and size from the environment where they are negative; given values take precedence. Throws a
// ConfigError that names the variable, its value and what was expected. Calls `above` only where the
// variables cannot tell which of several launchers is the inner one.
Identity identity_from_environment(int rank = -1, int size = -1,
                                   const std::function<std::vector<Process>()>& above = ancestors);

}  // namespace lockstep::detail

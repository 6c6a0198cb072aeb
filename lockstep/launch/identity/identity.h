// Who am I? Reads what the launcher left in the environment: `lockstep run`, torchrun, mpirun of Open MPI
// and MPICH, srun, or a person. The innermost launcher counts; docs/guides/launching.md has the table.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include <lockstep/launch/identity/ancestors.h>

namespace lockstep::detail {

struct Identity {
  int rank = 0;
  int size = 1;
  std::optional<int> local_rank, local_size;  // nothing: worked out with the others
  // "lockstep run", "torchrun", "Open MPI", "MPICH", "SLURM", "environment" (RANK and WORLD_SIZE by hand),
  // "the program" (given as arguments), "none".
  std::string launcher = "none";
  int restart_count = 0;
  // The name of the socket of the agent that `lockstep run` holds; empty under other launchers.
  std::string agent;
  // Under other launchers: the same text on every rank of this job (and restart), and of no other job here.
  // At most 72 characters.
  std::string job;
  // Where agents of several hosts meet; an empty address: not known, then all ranks must be on one host. A
  // port that was given is both first and last; one that was worked out is a range, and any of it may be
  // taken.
  std::string master_address;
  int master_port = 0, last_master_port = 0;
  // torchrun's agent listens at master_port already: the head takes another port and tells it through that
  // store.
  bool store_is_served = false;
  std::optional<int> threads;  // per rank, where somebody said so
};

// rank and size below 0 are read from the environment; given ones go before it. Throws ConfigError that
// names the variable, its value and what is allowed. `above` is asked where variables do not tell all: which
// of several launchers is the inner one.
Identity identity_from_environment(int rank = -1, int size = -1,
                                   const std::function<std::vector<Process>()>& above = ancestors);

}  // namespace lockstep::detail

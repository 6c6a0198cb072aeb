// Who am I? Reads what the launcher left in the environment. torchrun's names are the contract; those of
// Open MPI's and MPICH's mpirun count where RANK and WORLD_SIZE are not set.
#pragma once

#include <optional>
#include <string>

namespace lockstep::detail {

struct Identity {
  int rank = 0;
  int size = 1;
  std::optional<int> local_rank, local_size;  // nothing: to be worked out with the others
  std::string master_address;                 // empty in a world of one
  int master_port = 0;
  // Somebody else listens at the master's port already (torchrun's agent): rank 0 joins like the rest.
  bool store_is_served = false;
  // A socket that the launcher has bound to the master's port for rank 0, so that nobody else can take it.
  std::optional<int> listen_fd;
  int restart_count = 0;
  std::string launcher = "none";
};

// rank and size below 0 are read from the environment; given ones go before it. Throws ConfigError that
// names the variable, its value and what is allowed.
Identity identity_from_environment(int rank = -1, int size = -1);

// The same text on ranks that can share memory: this boot of this machine, and the network namespace, so
// that containers with networks of their own count as hosts of their own.
std::string host_identity();

}  // namespace lockstep::detail

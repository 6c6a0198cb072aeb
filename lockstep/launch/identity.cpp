#include <lockstep/launch/identity.h>

#include <sys/stat.h>

#include <fstream>
#include <limits>

#include <fmt/format.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>

namespace lockstep::detail {
namespace {

constexpr int kMostRanks = 1 << 20;

// The variables of one launcher.
struct Names {
  const char* launcher;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};

constexpr Names kLaunchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
};

std::optional<int> number(const char* name, int lowest, int highest) {
  auto value = env::integer(name, lowest, highest);
  if (!value) return std::nullopt;
  return static_cast<int>(*value);
}

void read_ranks(Identity& identity, const Names& names) {
  auto size = number(names.size, 1, kMostRanks);
  auto rank = number(names.rank, 0, kMostRanks - 1);
  if (rank && !size)
    throw ConfigError(
        fmt::format("{}={} is set and {} is not: a launcher sets both, a program alone has neither",
                    names.rank, *rank, names.size));
  if (size && !rank)
    throw ConfigError(
        fmt::format("{}={} is set and {} is not: a launcher sets both, a program alone has neither",
                    names.size, *size, names.rank));
  if (*rank >= *size)
    throw ConfigError(fmt::format("{}={} is not allowed: with {}={} it is from 0 to {}", names.rank, *rank,
                                  names.size, *size, *size - 1));
  identity.rank = *rank;
  identity.size = *size;
  identity.launcher = names.launcher;
  identity.local_size = number(names.local_size, 1, *size);
  identity.local_rank = number(names.local_rank, 0, identity.local_size.value_or(*size) - 1);
}

void read_master(Identity& identity) {
  auto address = env::text("MASTER_ADDR");
  auto port = number("MASTER_PORT", 1, std::numeric_limits<std::uint16_t>::max());
  if (!address || !port)
    throw ConfigError(fmt::format(
        "{} is not set: with {} ranks it must be {}", address ? "MASTER_PORT" : "MASTER_ADDR", identity.size,
        address ? "a free port of rank 0's host, from 1 to 65535" : "rank 0's host"));
  identity.master_address = *address;
  identity.master_port = *port;
  identity.store_is_served = env::flag("TORCHELASTIC_USE_AGENT_STORE", false);
  identity.listen_fd = number("LOCKSTEP_LISTEN_FD", 3, 1 << 20);
}

}  // namespace

Identity identity_from_environment(int rank, int size) {
  Identity identity;
  if (rank >= 0 || size >= 0) {
    if (size < 1 || size > kMostRanks)
      throw ConfigError(fmt::format("world_size={} is not allowed: from 1 to {} is, given together with rank",
                                    size, kMostRanks));
    if (rank < 0 || rank >= size)
      throw ConfigError(
          fmt::format("rank={} is not allowed: with world_size={} it is from 0 to {}", rank, size, size - 1));
    identity.rank = rank;
    identity.size = size;
    identity.launcher = "the program";
  } else {
    for (const Names& names : kLaunchers)
      if (env::text(names.rank) || env::text(names.size)) {
        read_ranks(identity, names);
        break;
      }
  }
  if (identity.size > 1)
    read_master(identity);
  else
    identity.local_rank = 0, identity.local_size = 1;
  identity.restart_count = number("TORCHELASTIC_RESTART_COUNT", 0, kMostRanks).value_or(0);
  return identity;
}

std::string host_identity() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  struct stat network {};
  ::stat("/proc/self/ns/net", &network);
  return fmt::format("{}/{}", boot, network.st_ino);
}

}  // namespace lockstep::detail
